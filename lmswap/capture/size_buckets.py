"""Buckets of sizes: all sizes of one bucket are served by the plan of its largest one."""

from __future__ import annotations

_STEPS = 4  # from one power of two to the next, as the caching allocator's roundup_power2_divisions


def bucket_edge(size: int) -> int:
    """Return the largest size of the bucket of ``size``: one of four steps from one power of two to the next."""
    if size <= 2 * _STEPS:
        return size
    step = 1 << ((size - 1).bit_length() - 1) >> _STEPS.bit_length() - 1
    return -(-size // step) * step
