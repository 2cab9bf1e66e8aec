"""Decides whether a step is replanned: pure functions from what its last run has shown to reasons as data.

`counted` adds to a step what a run has shown, `triggers` compares the two, and `merged` makes of all triggers of a step
boundary the one request that answers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmswap.ir.costs import OpCosts
from lmswap.ir.fixed_memory import TrainedMemory
from lmswap.ir.program import BufferKind
from lmswap.planner import simulate
from lmswap.planner.calibrate import Calibration, calibrate_host
from lmswap.reporting.replan_reasons import (
    AccumulatedGradients,
    CompressedExcess,
    HeldGrowth,
    InUseGrowth,
    LossExcess,
    MisplacedTensor,
    PredictionOff,
    Trigger,
    UnusedMargin,
    UnusedMemory,
    WarmUpGrowth,
)
from lmswap.session import compression_ratio
from lmswap.session.allowance import GROWTH_BYTES, Allowance
from lmswap.session.plan_request import PlanRequest
from lmswap.session.planned_step import History, Phase, PlannedStep

# Memory that becomes available once growth is known causes replanning if it exceeds this share of the budget.
_WORTH_USING = 0.04


@dataclass(frozen=True)
class StepObservation:
    """What a step that followed its plan has shown, by the time the next one like it begins."""

    history: History  # of the step's runs, this one included
    peak_bytes: int  # of device memory in it
    held_bytes: int  # by tensors outside of steps, when the next one begins
    earlier_output_bytes: int = 0  # of it, which the caller holds then, and no more in the next backward
    accumulated_bytes: int | None = None  # outside of it, if it accumulates gradients from now on; None: it does not
    in_use_bytes: int | None = None  # outside of steps, when the next one begins; None: not measured
    trained: TrainedMemory | None = None  # by then, if measured
    fragmented_bytes: int = 0  # by which its peak exceeds the budget through fragmentation
    settled_margin_bytes: int | None = None  # that suffices for growth from now on, if that is known
    has_misplaced: bool = False  # it held a tensor at offsets of the next step, and more retention is assumed from now
    costs: OpCosts | None = None  # with the measured memory of its losses
    loss_bytes: int = 0  # of the largest one
    compressed_bytes: int | None = None  # that its tensors took in the compressed tier, if it swaps there
    host_seconds: tuple[float | None, ...] | None = None  # to queue its segments, where the device waited for that
    calibration: Calibration | None = None
    unused_reserve_bytes: int = 0
    unused_results_bytes: int = 0  # of results that the caller does not hold


def usual_peak_bytes(step: PlannedStep) -> int:
    """Return the highest peak of ``step`` that is no cause to measure growth besides tensors."""
    return min(step.history.read_peak_bytes + GROWTH_BYTES, step.allowance.budget_bytes)


def counted(step: PlannedStep, seen: StepObservation) -> PlannedStep:
    """Return ``step`` with what ``seen`` has shown; its plan is priced as before, but for the memory of a loss."""
    plan, costs, machine, merged = step.plan, step.costs, step.machine, step.merged
    allowance, history = _counted_memory(step, seen), seen.history
    if seen.in_use_bytes is not None:
        # What is compiled after the last search of the warm-up comes into use in the next run: 0 has it read once more.
        read_peak_bytes = seen.peak_bytes if step.history.phase is Phase.FINAL else 0
        history = replace(history, read_peak_bytes=read_peak_bytes)
    if seen.accumulated_bytes is not None:
        merged = replace(merged, program=merged.program.with_gradients(BufferKind.ACCUMULATED_GRADIENT))
    if seen.costs is not None or allowance.earlier_output_bytes != step.allowance.earlier_output_bytes:
        costs = seen.costs or costs
        streamed = allowance.room.with_streams(merged.program, costs)
        plan = replace(plan, predicted_peak_bytes=simulate(merged.program, streamed, machine, plan).peak_bytes)
    if seen.calibration is not None:
        costs, machine = seen.calibration.costs, seen.calibration.machine
        if seen.compressed_bytes is not None:
            machine = compression_ratio.with_needed_ratio(machine, plan, seen.compressed_bytes)
    elif (excess := _excess_of_tier(step, seen)) is not None:
        machine = compression_ratio.with_measured_ratio(machine, plan, excess.taken_bytes)
    if seen.host_seconds is not None:
        machine = calibrate_host(merged.program, plan, machine, seen.host_seconds)
        history = replace(history, host_of=plan)
    known: dict[str, Any] = {"plan": plan, "costs": costs, "machine": machine, "merged": merged}
    known |= {"allowance": allowance, "history": history}
    return step if all(getattr(step, name) is value for name, value in known.items()) else replace(step, **known)


def triggers(
    before: PlannedStep, step: PlannedStep, seen: StepObservation, *, policy: str, is_fixed: bool
) -> tuple[Trigger, ...]:
    """Return the reasons to replan a step, in the order in which they are reported.

    Args:
        before: the step as it ran.
        step: the step with what ``seen`` has shown, priced by its costs.
        seen: what its run has shown.
        policy: of the model.
        is_fixed: whether the plans are those of a file, which no gain can replace.
    """
    found = (*_of_memory(before, step, seen), *filter(None, [_excess_of_tier(before, seen)]))
    if before.history.phase is step.history.phase:
        return found
    if step.history.phase is Phase.CALIBRATED and seen.calibration is not None:
        return (*found, *_of_calibration(step, seen.calibration, seen, has_grown=bool(found)))
    if step.history.phase is Phase.FINAL:
        if step.is_outgrown and not found:
            return (WarmUpGrowth(step.allowance.grown_bytes, step.allowance.fragmented_bytes),)
        if not is_fixed and policy != "swap_all" and not found:
            return tuple(_of_margin(step))
    return found


def merged(step: PlannedStep, found: Sequence[Trigger], request: PlanRequest, *, is_priced: bool) -> PlanRequest:
    """Return ``request`` for ``step`` so that its plan answers all triggers ``found``.

    From the second growth on the plan leaves twice the growth free, if it can, as each replanning changes the plan.
    ``is_priced``: the step's plan is priced by the costs and machine of the step.
    """
    grows = any(isinstance(trigger, (HeldGrowth, InUseGrowth, LossExcess)) for trigger in found)
    return replace(
        request,
        ahead_bytes=2 * step.history.outgrown_bytes if grows else 0,
        priced=step.plan if is_priced else None,
    )


def saves_by_accumulating(step: PlannedStep, held_bytes: int) -> bool:
    """Whether ``step`` should accumulate each gradient as it is computed, if its caller adds gradients up.

    ``held_bytes`` are held by tensors outside of steps. Only where memory is short: gradients then die one by one.
    """
    is_short = step.moves or step.is_overdrawn or excess_held_bytes(step, held_bytes) > GROWTH_BYTES
    return is_short and step.merged.program.kind_of_gradients is BufferKind.GRADIENT


def excess_held_bytes(step: PlannedStep, held_bytes: int) -> int:
    """Return how many bytes more than planned tensors outside of ``step`` hold: kept gradients, averages."""
    return held_bytes - step.allowance.tensor_bytes - step.allowance.kept_reserve_bytes


def _counted_memory(step: PlannedStep, seen: StepObservation) -> Allowance:
    allowance, excess_bytes = step.allowance, excess_held_bytes(step, seen.held_bytes)
    if seen.trained is not None:
        parameter_bytes = allowance.trained.parameter_bytes  # without weights, which are a part of the step
        allowance = replace(allowance, trained=seen.trained._replace(parameter_bytes=parameter_bytes))
    if seen.earlier_output_bytes > allowance.earlier_output_bytes:
        allowance = replace(allowance, earlier_output_bytes=seen.earlier_output_bytes)
    if seen.accumulated_bytes is not None:
        allowance = allowance.with_held(seen.accumulated_bytes + max(0, excess_bytes))
    elif excess_bytes > step.slack_bytes:
        allowance = allowance.with_held(excess_bytes)
    if seen.in_use_bytes is not None:
        grown = allowance.with_growth(seen.in_use_bytes, seen.fragmented_bytes)
        more_bytes = grown.base_bytes - (allowance.base_bytes - allowance.drift_bytes)
        is_counted = more_bytes > step.slack_bytes or step.history.phase is not Phase.FINAL
        allowance = grown if is_counted else allowance.drifted(more_bytes)
    if seen.unused_reserve_bytes:
        allowance = allowance.sparing(seen.unused_reserve_bytes)
    if seen.settled_margin_bytes is not None:
        allowance = allowance.settled(seen.settled_margin_bytes)
    return allowance


def _of_memory(before: PlannedStep, step: PlannedStep, seen: StepObservation) -> Iterator[Trigger]:
    held_bytes = step.allowance.tensor_bytes - before.allowance.tensor_bytes
    held_bytes += step.allowance.earlier_output_bytes - before.allowance.earlier_output_bytes
    grown_bytes = step.allowance.grown_bytes - before.allowance.grown_bytes
    if step.adds_up and not before.adds_up:
        yield AccumulatedGradients()
    elif held_bytes and step.excess_bytes > 0:
        yield HeldGrowth(held_bytes)
    if before.history.phase is Phase.FINAL and grown_bytes and step.excess_bytes > 0:
        yield InUseGrowth(grown_bytes)
    if seen.has_misplaced:
        yield MisplacedTensor()
    if seen.costs is not None and not step.is_overdrawn:
        is_first = before.history.num_runs == 0  # later it may be another one each time: the margin absorbs that
        if step.plan.predicted_peak_bytes > step.plan.budget_bytes + (0 if is_first else step.slack_bytes):
            yield LossExcess(seen.loss_bytes)


def _excess_of_tier(step: PlannedStep, seen: StepObservation) -> CompressedExcess | None:
    if seen.compressed_bytes is None:
        return None
    limit_bytes = step.machine.tier(compression_ratio.TIER).capacity_bytes
    if seen.compressed_bytes <= max(limit_bytes, step.history.accepted_bytes):
        return None
    return CompressedExcess(seen.compressed_bytes, limit_bytes)


def _of_calibration(
    step: PlannedStep, calibration: Calibration, seen: StepObservation, *, has_grown: bool
) -> Iterator[Trigger]:
    spared_bytes, results_bytes = step.allowance.spared_bytes, seen.unused_results_bytes
    # A search has shown that no plan takes less, or there is nothing to swap without a backward.
    if (step.is_overdrawn and not spared_bytes) or not step.backwards:
        return
    if calibration.is_out_of_tolerance:
        seconds, worst = (calibration.measured_seconds, calibration.predicted_seconds), calibration.worst
        title, op_seconds = step.merged.program.ops[worst.op].title, (worst.measured_seconds, worst.predicted_seconds)
        yield PredictionOff(*seconds, calibration.host_seconds, title, *op_seconds)
    if step.is_outgrown and not has_grown:
        yield WarmUpGrowth(step.allowance.grown_bytes, step.allowance.fragmented_bytes)
    if step.moves and spared_bytes + results_bytes > GROWTH_BYTES:
        yield UnusedMemory(spared_bytes, results_bytes)


def _of_margin(step: PlannedStep) -> Iterator[Trigger]:
    room_bytes = step.allowance.step_bytes - step.room.step_bytes
    is_known = step.allowance.settled_margin_bytes is not None and not step.is_overdrawn
    if is_known and room_bytes > _WORTH_USING * step.allowance.budget_bytes:
        yield UnusedMargin(room_bytes)
