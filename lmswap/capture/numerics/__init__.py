"""Bitwise equality of traces with eager mode: orders, rounding, random state, metadata."""
