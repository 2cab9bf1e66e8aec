"""Bitwise equality of traces with eager mode: orders, rounding, random state, metadata.

Each module corrects, refuses or notes one kind of difference. Its docstring names the torch in which that was last seen
and the upstream issue (pytorch#NUMBER), so that the module can be removed once torch traces what eager mode runs.
"""
