"""How far was the prediction off, and what follows? Predicted and measured timelines → corrected costs and rates.

Where the device waited for the host, a measured step tells what the host takes, and little of what ops take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Host, Machine, Rate
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import Schedule, schedule
from lmswap.ir.timeline import Lane, Timeline

# A prediction that is off by more is made again from what was measured.
TOLERANCE = 0.1


@dataclass(frozen=True)
class OpTime:
    """One run of an op, its waits for copies left out."""

    op: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def error_seconds(self) -> float:
        """By how much the prediction was off."""
        return abs(self.measured_seconds - self.predicted_seconds)


@dataclass(frozen=True)
class Calibration:
    """One step: seconds inside its graphs as predicted and as measured, and costs that would have predicted the latter.

    ``worst`` is the run that was off most; ``host_seconds`` is what the host took to queue what the device waited for.
    """

    predicted_seconds: float
    measured_seconds: float
    costs: OpCosts
    machine: Machine
    worst: OpTime
    host_seconds: float = 0.0

    @property
    def error(self) -> float:
        """By how much the prediction was off, as a share of it."""
        return abs(self.measured_seconds - self.predicted_seconds) / self.predicted_seconds

    @property
    def is_off(self) -> bool:
        """Whether the prediction was off by more than `TOLERANCE`."""
        return self.error > TOLERANCE


def calibrate(
    program: Program,
    costs: OpCosts,
    machine: Machine,
    plan: Plan,
    *,
    tier: str,
    predicted: Timeline,
    measured: Timeline,
    op_seconds: Sequence[Sequence[float]],
    host_seconds: Sequence[float | None] = (),
    segment_seconds: Sequence[float] = (),
) -> Calibration | None:
    """Corrects the seconds of ops, those of the host, and the rates of copies by direction, to what was measured.

    ``op_seconds`` is, by segment, what the runs of its ops took to compute, without waits for copies; where it has
    another number of them, as one for all, they share the sum as predicted. ``host_seconds`` is, by segment, what the
    host took to queue it if the device waited for that; ``segment_seconds`` what it took in a step whose ops were not
    timed. None if other segments ran than the program has.
    """
    runs = schedule(program, plan.recomputes)
    if len(op_seconds) != len(program.segments):
        return None
    op_seconds = _without_marks(op_seconds, segment_seconds)
    if machine.host is None or len(host_seconds) != len(op_seconds):
        host_seconds = [None] * len(op_seconds)
    times = _op_times(runs, predicted, op_seconds, host_seconds)
    machine = replace(machine, host=_host(runs, plan, machine.host, host_seconds))
    link = machine.tier(tier).link
    out_rate, in_rate = (
        _scaled(rate, measured.busy_seconds(lane), predicted.busy_seconds(lane))
        for rate, lane in ((link.out_rate, Lane.OUT), (link.in_rate, Lane.IN))
    )
    return Calibration(
        predicted_seconds=predicted.seconds,
        measured_seconds=sum(map(sum, op_seconds)) + measured.lane_seconds(Lane.STALL),
        costs=replace(costs, seconds=_corrected(program, costs, times)),
        machine=machine.with_link(tier, replace(link, out_rate=out_rate, in_rate=in_rate)),
        worst=max(times, key=lambda time: time.error_seconds),
        host_seconds=sum(seconds for seconds in host_seconds if seconds is not None),
    )


def host_as_measured(program: Program, plan: Plan, machine: Machine, host_seconds: Sequence[float | None]) -> Machine:
    """``machine``, whose host takes what it took for the segments of a step that the device waited for."""
    if len(host_seconds) != len(program.segments):
        return machine
    return replace(machine, host=_host(schedule(program, plan.recomputes), plan, machine.host, host_seconds))


def _without_marks(
    op_seconds: Sequence[Sequence[float]], segment_seconds: Sequence[float]
) -> Sequence[Sequence[float]]:
    """``op_seconds``, scaled where their segment took less in a step whose ops were not timed.

    Marks between ops take time; memory that was touched for the first time did in the step before.
    """
    if len(segment_seconds) != len(op_seconds):
        return op_seconds
    found = []
    for ops, before in zip(op_seconds, segment_seconds, strict=True):
        scale = min(1.0, before / sum(ops)) if any(ops) else 1.0
        found.append([scale * seconds for seconds in ops])
    return found


def _op_times(
    runs: Schedule,
    predicted: Timeline,
    op_seconds: Sequence[Sequence[float]],
    host_seconds: Sequence[float | None],
) -> list[OpTime]:
    """Every run of the schedule. One that waited for the host took what was predicted, for all that can be told."""
    expected = [span.seconds for span in predicted.spans if span.lane is Lane.COMPUTE]
    times: list[OpTime] = []
    for segment, found, of_host in zip(runs.program.segments, op_seconds, host_seconds, strict=True):
        planned = expected[segment.start : segment.stop]
        shares = found if len(found) == len(planned) and of_host is None else planned
        scale = sum(found) / sum(shares) if any(shares) else 1.0
        scale = scale if of_host is None else min(1.0, scale)
        ops = runs.ops[segment.start : segment.stop]
        times += [OpTime(op, was, scale * share) for op, was, share in zip(ops, planned, shares, strict=True)]
    return times


def _host(runs: Schedule, plan: Plan, host: Host | None, host_seconds: Sequence[float | None]) -> Host | None:
    """``host``, slower or faster by what it was in the segments whose seconds are known."""
    starts = [start for swap in plan.swaps for start in (swap.out_start, swap.in_start) if start is not None]
    predicted = measured = 0.0
    for segment, seconds in zip(runs.program.segments, host_seconds, strict=True):
        if host is not None and seconds is not None:
            num_copies = sum(segment.start <= start < segment.stop for start in starts)
            predicted += host.seconds(segment.stop - segment.start, num_copies)
            measured += seconds
    return host.times(predicted / measured) if host is not None and predicted > 0 and measured > 0 else host


def _corrected(program: Program, costs: OpCosts, times: Sequence[OpTime]) -> tuple[float, ...]:
    """Seconds by op. Ops that were said to cost the same, as those of equal layers are, are corrected as one."""
    kinds = [(op.target, seconds) for op, seconds in zip(program.ops, costs.seconds, strict=True)]
    runs_of: dict[tuple[str, float], list[OpTime]] = defaultdict(list)
    for time in times:
        runs_of[kinds[time.op]].append(time)
    corrected = {}
    for kind, same in runs_of.items():
        predicted, measured = sum(time.predicted_seconds for time in same), sum(time.measured_seconds for time in same)
        corrected[kind] = kind[1] * measured / predicted if predicted > 0 else measured / len(same)
    return tuple(corrected[kind] for kind in kinds)


def _scaled(rate: Rate, measured_seconds: float, predicted_seconds: float) -> Rate:
    if measured_seconds <= 0 or predicted_seconds <= 0:
        return rate  # nothing was copied this way
    return rate.times(predicted_seconds / measured_seconds)
