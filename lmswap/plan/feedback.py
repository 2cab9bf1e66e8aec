"""How far was the prediction off, and what follows? Predicted and measured timelines → corrected costs and rates."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine, Rate
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Timeline

# A prediction that is off by more is made again from what was measured.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Feedback:
    """One step: seconds inside its graphs as predicted and as measured, and what would have predicted the latter."""

    predicted_seconds: float
    measured_seconds: float
    costs: OpCosts
    machine: Machine

    @property
    def is_off(self) -> bool:
        """Whether the prediction was off by more than `TOLERANCE`."""
        return abs(self.measured_seconds - self.predicted_seconds) > TOLERANCE * self.predicted_seconds


def compare(
    program: Program,
    costs: OpCosts,
    machine: Machine,
    plan: Plan,
    *,
    tier: str,
    predicted: Timeline,
    measured: Timeline,
) -> Feedback | None:
    """Scales the seconds of ops by segment, and the rates of copies by direction, to what was measured.

    Compute spans of ``measured`` are called by their segment. None if it ran other segments than the program has.
    """
    compute: dict[str, float] = defaultdict(float)
    for span in measured.spans:
        if span.lane is Lane.COMPUTE:
            compute[span.name] += span.seconds
    if len(compute) != len(program.segments):
        return None
    runs = schedule(program, plan.reruns)
    run_seconds, seconds = runs.costs(costs).seconds, list(costs.seconds)
    for segment, run, measured_seconds in zip(program.segments, runs.program.segments, compute.values(), strict=True):
        expected_seconds = sum(run_seconds[run.start : run.stop])
        if expected_seconds > 0:
            for op in range(segment.start, segment.stop):
                seconds[op] *= measured_seconds / expected_seconds
    link = machine.tier(tier).link
    out_rate, in_rate = (
        _scaled(rate, measured.busy_seconds(lane), predicted.busy_seconds(lane))
        for rate, lane in ((link.out_rate, Lane.OUT), (link.in_rate, Lane.IN))
    )
    return Feedback(
        predicted_seconds=predicted.seconds,
        measured_seconds=sum(compute.values()) + measured.lane_seconds(Lane.STALL),
        costs=OpCosts(tuple(seconds), costs.scratch_bytes, costs.source),
        machine=machine.with_link(tier, replace(link, out_rate=out_rate, in_rate=in_rate)),
    )


def _scaled(rate: Rate, measured_seconds: float, predicted_seconds: float) -> Rate:
    if measured_seconds <= 0 or predicted_seconds <= 0:
        return rate  # nothing was copied this way
    return rate.times(predicted_seconds / measured_seconds)
