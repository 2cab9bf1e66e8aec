"""What eager mode computes and a plain trace would not, bit by bit: orders, rounding, random state, metadata."""
