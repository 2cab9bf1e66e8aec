"""Calibration: predicted and measured timelines → prediction error, and corrected costs and rates.

Where the device waited for the host, a measured step calibrates the host's seconds, not those of the ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Host, Machine, Rate
from lmswap.ir.plan import Plan, SwapAction
from lmswap.ir.program import Program
from lmswap.ir.schedule import Schedule, schedule
from lmswap.ir.timeline import Lane, Timeline

# A step whose prediction is off by more is predicted again from measurements.
TOLERANCE = 0.1


@dataclass(frozen=True)
class OpTime:
    """One run of an op, without its waits for copies."""

    op: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def error_seconds(self) -> float:
        """Absolute error of the prediction."""
        return abs(self.measured_seconds - self.predicted_seconds)


@dataclass(frozen=True)
class Calibration:
    """One step: predicted and measured seconds inside its graphs, and costs that would have predicted the latter.

    ``worst`` is the run with the largest error; ``host_seconds`` is the host's time to queue the segments
    for which the device waited.
    """

    predicted_seconds: float
    measured_seconds: float
    costs: OpCosts
    machine: Machine
    worst: OpTime
    host_seconds: float = 0.0

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.measured_seconds - self.predicted_seconds) / self.predicted_seconds

    @property
    def is_out_of_tolerance(self) -> bool:
        """Whether the error is more than `TOLERANCE`."""
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
    """Corrects the seconds of ops and host, and the rates of copies by direction, to a measured step.

    Args:
        program: the planned step; ``costs``, ``machine`` and ``plan`` are its own.
        costs: those of the prediction.
        machine: that of the prediction.
        plan: what ran.
        tier: name of the plan's tier.
        predicted: the timeline by ``costs`` and ``machine``.
        measured: the timeline of the step.
        op_seconds: by segment, seconds of its runs without waits for copies; runs share the sum as predicted if their
            number differs, as with one for all.
        host_seconds: by segment, the host's seconds to queue it if the device waited for that, else None.
        segment_seconds: by segment, its seconds in a step whose ops were not timed.

    Returns:
        The corrections; None if the measured segments are not those of the program.
    """
    runs = schedule(program, plan.recomputes)
    if len(op_seconds) != len(program.segments):
        return None
    op_seconds = _without_timing_overhead(op_seconds, segment_seconds)
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


def calibrate_host(program: Program, plan: Plan, machine: Machine, host_seconds: Sequence[float | None]) -> Machine:
    """``machine`` with the host's seconds scaled to the segments for which the device waited.

    Args:
        program: the planned step.
        plan: what ran.
        machine: that of the prediction.
        host_seconds: by segment, the host's seconds to queue it if the device waited for that, else None.
    """
    if len(host_seconds) != len(program.segments):
        return machine
    return replace(machine, host=_host(schedule(program, plan.recomputes), plan, machine.host, host_seconds))


def _without_timing_overhead(
    op_seconds: Sequence[Sequence[float]], segment_seconds: Sequence[float]
) -> Sequence[Sequence[float]]:
    """``op_seconds``, scaled down where their segment took less in a step whose ops were not timed.

    Timing marks between ops take time; first touches of memory took time in the step before.
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
    """Every run of the schedule. One that waited for the host counts as predicted: its own seconds are unknown."""
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
    """``host``, scaled by its measured over predicted seconds in the segments where these are known."""
    num_ops = len(runs.program.ops)
    actions = (action for swap in plan.swaps for action in swap.actions(num_ops))
    starts = [position for position, action in actions if action in (SwapAction.OUT_START, SwapAction.IN_START)]
    predicted = measured = 0.0
    for segment, seconds in zip(runs.program.segments, host_seconds, strict=True):
        if host is not None and seconds is not None:
            num_copies = sum(segment.start <= start < segment.stop for start in starts)
            predicted += host.seconds(segment.stop - segment.start, num_copies)
            measured += seconds
    return host.times(predicted / measured) if host is not None and predicted > 0 and measured > 0 else host


def _corrected(program: Program, costs: OpCosts, times: Sequence[OpTime]) -> tuple[float, ...]:
    """Seconds by op. Ops with equal target and cost, as those of equal layers, are corrected together."""
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
