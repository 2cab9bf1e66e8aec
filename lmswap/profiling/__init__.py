"""Utilization of device and links over chosen steps, from profilers' files and the engine's own record alike."""
