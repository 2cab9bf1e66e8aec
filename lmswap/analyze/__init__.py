"""What is true of a program whatever the plan? Live ranges, gaps, memory curve, lower bounds, costs, graph levels."""
