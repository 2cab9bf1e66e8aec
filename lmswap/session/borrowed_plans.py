"""Sizes that run by the plan of larger ones: what that costs, and when a plan of their own pays.

A plan for larger sizes fits, but moves more than needed. It serves a bucket of smaller ones at once, without a pause,
until its steps have lost as many seconds that way as making a plan takes: at most twice what they would have lost had
their number been known.
"""

from __future__ import annotations

from collections.abc import Hashable

from lmswap.capture.size_buckets import bucket_edge
from lmswap.torch_compat.symbolic_sizes import Sizes


class BorrowedPlans:
    """What each bucket of sizes of one trace has lost to plans for larger ones."""

    def __init__(self) -> None:
        self.planning_seconds = 0.0  # of the last plan that was made for the trace
        self._lost_seconds: dict[Hashable, float] = {}

    def note_run(self, sizes: Sizes, lost_seconds: float) -> None:
        """Count a run of ``sizes``, which took ``lost_seconds`` longer than in unlimited memory."""
        bucket = _bucket(sizes)
        self._lost_seconds[bucket] = self._lost_seconds.get(bucket, 0.0) + lost_seconds

    def have_cost_a_plan(self, sizes: Sizes) -> bool:
        """Whether the bucket of ``sizes`` has lost as much as it takes to make a plan for it."""
        return self._lost_seconds.get(_bucket(sizes), 0.0) > self.planning_seconds


def _bucket(sizes: Sizes) -> Hashable:
    return frozenset((symbol, bucket_edge(size)) for symbol, size in sizes.items())
