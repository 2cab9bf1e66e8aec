"""What do repeated runs say together? Overheads as medians over repeats, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.unet3d.run import Run


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest of what it is a median of."""

    median: float
    low: float
    high: float
    num: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(statistics.median(values), min(values), max(values), len(values))


def overhead(swapped: Sequence[Run], unswapped: Sequence[Run]) -> Spread | None:
    """Seconds a step over those of the run beside it with unlimited memory, by repeat; None without any such pair."""
    pairs = zip(swapped, unswapped, strict=False)
    values = [with_budget.seconds_per_step / without.seconds_per_step for with_budget, without in pairs]
    return Spread.of(values) if values else None
