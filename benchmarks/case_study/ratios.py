"""Statistics of repeated runs: overheads as medians over repeats, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.unet3d.measured import Run


@dataclass(frozen=True)
class Spread:
    """A median with the minimum and maximum of its values."""

    median: float
    low: float
    high: float
    num: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return Spread(statistics.median(values), min(values), max(values), len(values))


def overhead(swapped: Sequence[Run], unswapped: Sequence[Run]) -> Spread | None:
    """Spread over repeats of step time relative to that with unlimited memory, run by run; None without any pair."""
    values = [_ratio(with_budget, without) for with_budget, without in zip(swapped, unswapped, strict=False)]
    return Spread.of(values) if values else None


def _ratio(run: Run, basis: Run) -> float:
    """Ratio of median step times; of runs that alternated step by step, the median ratio of neighbouring steps."""
    if not (run.configuration.takes_turns and basis.configuration.takes_turns):
        return run.seconds_per_step / basis.seconds_per_step
    return statistics.median(ours / theirs for ours, theirs in zip(run.timed_seconds, basis.timed_seconds, strict=True))
