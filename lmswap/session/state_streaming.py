"""The part of a training state that streams: of some splits, that with which step and update take least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Link
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.cache import CachedPlan
from lmswap.session.allowance import Allowance
from lmswap.session.planner import Planner
from lmswap.training_state.updates import Updates

_SHARES = (0.25, 0.5, 0.75, 1.0)
_WORTH_STREAMING = 0.02  # of the step's seconds: less is within the error of predictions


class Split(NamedTuple):
    """Bytes of optimizer state that stream, and whether gradients do."""

    state_bytes: int
    has_gradients: bool


def best_split(
    planner: Planner,
    updates: Updates,
    program: Program,
    costs: OpCosts,
    allowance: Allowance,
    *,
    tier: str,
    planned: CachedPlan | None,
    may_stream_gradients: bool,
) -> Split | None:
    """Return what of state and gradients to stream to ``tier``; None if more than now gains nothing.

    An update is assumed in each step, and that its copies run beside each other, but not beside the step.

    Args:
        planner: of the model.
        updates: of the model's optimizers.
        program: the step.
        costs: its costs.
        allowance: what the step may occupy while as much streams as now.
        tier: where it is between updates.
        planned: the plan of the step; None if none fits.
        may_stream_gradients: whether the gradients of the step can.
    """
    best, best_seconds = None, float("inf")
    if planned is not None:
        link, plan = planned.machine.tier(tier).link, planned.plan
        best_seconds = plan.predicted_seconds + update_seconds(link, trained_bytes(plan, program))
        best_seconds *= 1 - _WORTH_STREAMING
    for split in _splits(updates, may_stream_gradients=may_stream_gradients):
        step, left = _by(split, updates, program, allowance)
        if left.step_bytes <= allowance.step_bytes and not split.has_gradients:
            continue
        found = planner.try_within(step, costs, left)
        if found is None:
            continue
        gradient_bytes = program.gradient_bytes * split.has_gradients
        more_bytes = split.state_bytes - updates.streamed_bytes + gradient_bytes
        target = found.machine.tier(tier)
        if split.state_bytes + gradient_bytes + found.plan.tier_bytes.get(tier, 0) > target.held_bytes:
            continue
        seconds = found.plan.predicted_seconds
        seconds += update_seconds(target.link, more_bytes + trained_bytes(found.plan, step))
        if seconds < best_seconds:
            best, best_seconds = split, seconds
        if not found.plan.moves:
            break  # a larger split gains nothing, and its updates take longer
    return best


def largest_split(
    updates: Updates, program: Program, allowance: Allowance, *, held_bytes: int, may_stream_gradients: bool
) -> tuple[Program, Allowance] | None:
    """Return the step, and what it may occupy, if as much streams as can: its budget can be the least.

    None if no more than now can, or a tier of ``held_bytes`` cannot hold it.
    """
    *_, split = (None, *_splits(updates, may_stream_gradients=may_stream_gradients))
    if split is None or split.state_bytes + program.gradient_bytes * split.has_gradients > held_bytes:
        return None
    return _by(split, updates, program, allowance)


def _by(split: Split, updates: Updates, program: Program, allowance: Allowance) -> tuple[Program, Allowance]:
    """Return the step by ``split``, and what it may occupy."""
    window_bytes, update_bytes = updates.window_bytes(streams=True, streams_gradients=split.has_gradients), 0
    if allowance.reuses_step:
        window_bytes, update_bytes = 0, window_bytes
    freed_bytes = _freed_bytes(split, updates, allowance) + allowance.window_bytes - window_bytes
    reserved_bytes = min(freed_bytes, allowance.optimizer_reserve_bytes, allowance.reserve_bytes)
    held_bytes, trained = freed_bytes - reserved_bytes, allowance.trained
    state_bytes = min(held_bytes, trained.optimizer_bytes)
    left = replace(
        allowance,
        found_bytes=allowance.found_bytes - held_bytes,
        tensor_bytes=allowance.tensor_bytes - held_bytes,
        reserve_bytes=allowance.reserve_bytes - reserved_bytes,
        optimizer_reserve_bytes=allowance.optimizer_reserve_bytes - reserved_bytes,
        window_bytes=window_bytes,
        update_bytes=update_bytes,
        streams_gradients=allowance.reuses_step and split.has_gradients,
        trained=trained._replace(
            gradient_bytes=trained.gradient_bytes - (held_bytes - state_bytes),
            optimizer_bytes=trained.optimizer_bytes - state_bytes,
            pending_optimizer_bytes=trained.pending_optimizer_bytes - reserved_bytes,
        ),
    )
    return (program.with_gradients(BufferKind.ACCUMULATED_GRADIENT) if split.has_gradients else program), left


def _splits(updates: Updates, *, may_stream_gradients: bool) -> Iterator[Split]:
    """Yield splits of which more streams than now: gradients after all state, as they cost a backward copies, too."""
    total_bytes = updates.state_bytes
    if updates.gradients.are_streamed:
        return
    shares = (int(share * total_bytes) for share in _SHARES)
    yield from (Split(nbytes, has_gradients=False) for nbytes in shares if nbytes > updates.streamed_bytes)
    if may_stream_gradients:
        yield Split(total_bytes, has_gradients=True)


def _freed_bytes(split: Split, updates: Updates, allowance: Allowance) -> int:
    """Return the device memory that ``split`` frees outside of a step, without the window of updates."""
    held = allowance.trained
    freed_bytes = min(split.state_bytes - updates.streamed_bytes, held.optimizer_bytes + held.pending_optimizer_bytes)
    return freed_bytes + split.has_gradients * held.gradient_bytes


def trained_bytes(plan: Plan, program: Program) -> int:
    """Return the bytes of weights that ``plan`` moves and the optimizer updates."""
    trained = {parameter for parameter, _ in program.gradients}
    moved = {swap.buffer for swap in plan.swaps} & trained
    return sum(program.buffers[buffer].nbytes for buffer in moved if program.buffers[buffer].kind is BufferKind.WEIGHT)


def update_seconds(link: Link, nbytes: int) -> float:
    """Return the seconds of copying ``nbytes`` in and out, while both directions are busy."""
    return max(link.out_rate.seconds(nbytes), link.in_rate.seconds(nbytes)) * 2 / link.both_rate
