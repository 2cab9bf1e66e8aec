"""How busy are device and link over chosen steps? Profilers' files and the engine's own record → the same figures."""
