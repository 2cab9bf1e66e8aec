"""Plan-independent facts of a program: lifetimes, gaps, memory curve, lower bounds, estimated costs, graph levels."""
