"""How far was the prediction off, and what follows? Predicted and measured timelines → corrected costs and rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine, Rate
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import Schedule, schedule
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.plan.simulate import simulate

# A prediction that is off by more is made again from what was measured.
TOLERANCE = 0.1

# A stretch of less of the step is measured together with the next: a launch or a page fault would be much of it.
_SHORTEST = 0.01


@dataclass(frozen=True)
class Stretch:
    """What compute did between two waits for copies, or the ends of a segment: runs [start, stop) of the schedule."""

    start: int
    stop: int
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class Feedback:
    """One step: seconds inside its graphs as predicted and as measured, and what would have predicted the latter.

    ``costs`` and ``machine`` predict ``corrected_seconds`` for the same plan. ``first_op`` and ``last_op`` bound the
    stretch of the program in which compute was off most.
    """

    predicted_seconds: float
    measured_seconds: float
    costs: OpCosts
    machine: Machine
    corrected_seconds: float
    worst: Stretch
    first_op: int
    last_op: int

    @property
    def error(self) -> float:
        """By how much the prediction was off, as a share of it."""
        return abs(self.measured_seconds - self.predicted_seconds) / self.predicted_seconds

    @property
    def is_off(self) -> bool:
        """Whether the prediction was off by more than `TOLERANCE`."""
        return self.error > TOLERANCE


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
    """Scales the seconds of ops by stretch, and the rates of copies by direction, to what was measured.

    A stretch ends where compute waits for a copy, whether it had to or not: its ops were measured together. Compute
    spans of ``measured`` are called by their segment, stalls by their buffer; see `lmswap.execute.record`. None if it
    ran other segments than the program has.
    """
    runs = schedule(program, plan.reruns)
    segments = dict.fromkeys(span.name for span in measured.spans if span.lane is Lane.COMPUTE)
    if len(segments) != len(program.segments):
        return None
    stretches = list(_stretches(runs, plan, predicted, measured))
    first_run = {op: run for run, op in reversed(list(enumerate(runs.ops)))}
    factor = {
        run: stretch.measured_seconds / stretch.predicted_seconds
        for stretch in stretches
        for run in range(stretch.start, stretch.stop)
        if stretch.predicted_seconds > 0
    }
    seconds = [each * factor.get(first_run[op], 1.0) for op, each in enumerate(costs.seconds)]
    worst = max(stretches, key=lambda stretch: abs(stretch.measured_seconds - stretch.predicted_seconds))
    link = machine.tier(tier).link
    out_rate, in_rate = (
        _scaled(rate, measured.busy_seconds(lane), predicted.busy_seconds(lane))
        for rate, lane in ((link.out_rate, Lane.OUT), (link.in_rate, Lane.IN))
    )
    corrected_costs = OpCosts(tuple(seconds), costs.scratch_bytes, costs.source)
    corrected_machine = machine.with_link(tier, replace(link, out_rate=out_rate, in_rate=in_rate))
    return Feedback(
        predicted_seconds=predicted.seconds,
        measured_seconds=measured.lane_seconds(Lane.COMPUTE) + measured.lane_seconds(Lane.STALL),
        costs=corrected_costs,
        machine=corrected_machine,
        corrected_seconds=simulate(program, corrected_costs, corrected_machine, plan).seconds,
        worst=worst,
        first_op=runs.ops[worst.start],
        last_op=runs.ops[worst.stop - 1],
    )


def _stretches(runs: Schedule, plan: Plan, predicted: Timeline, measured: Timeline) -> Iterator[Stretch]:
    """The stretches of each segment, in order; short ones are joined."""
    expected = [span.seconds for span in predicted.spans if span.lane is Lane.COMPUTE]  # by run
    shortest_seconds = _SHORTEST * sum(expected)
    positions = _positions(runs, plan, measured)
    segments = iter(runs.program.segments)
    names: set[str] = set()
    found: list[Stretch] = []  # of the segment under way
    for span in measured.spans:
        if span.lane is Lane.COMPUTE and span.name not in names:
            yield from found
            names.add(span.name)
            segment = next(segments)
            found = [Stretch(segment.start, segment.stop, sum(expected[segment.start : segment.stop]), 0.0)]
        if span.lane is Lane.COMPUTE:
            found[-1] = replace(found[-1], measured_seconds=found[-1].measured_seconds + span.seconds)
        elif span in positions:
            last, position = found[-1], positions[span]
            before, after = sum(expected[last.start : position]), sum(expected[position : last.stop])
            if last.start < position < last.stop and min(before, after) >= shortest_seconds:
                done = replace(last, stop=position, predicted_seconds=before)
                found[-1:] = [done, Stretch(position, last.stop, after, 0.0)]
    yield from found


def _positions(runs: Schedule, plan: Plan, measured: Timeline) -> dict[Span, int]:
    """By stall of ``measured``: the run before which it was, where each wait for the buffer was recorded."""
    planned: dict[int, list[int]] = defaultdict(list)
    for swap in plan.swaps:
        waits = [swap.first_use] if swap.out_start is None else [swap.release, swap.first_use]
        planned[runs.buffers[swap.buffer]] += waits
    recorded: dict[int, list[Span]] = defaultdict(list)
    for span in measured.spans:
        if span.lane is Lane.STALL and span.buffer is not None:
            recorded[span.buffer].append(span)
    return {
        span: position
        for buffer, spans in recorded.items()
        if len(spans) == len(planned[buffer])
        for span, position in zip(spans, sorted(planned[buffer]), strict=True)
    }


def _scaled(rate: Rate, measured_seconds: float, predicted_seconds: float) -> Rate:
    if measured_seconds <= 0 or predicted_seconds <= 0:
        return rate  # nothing was copied this way
    return rate.times(predicted_seconds / measured_seconds)
