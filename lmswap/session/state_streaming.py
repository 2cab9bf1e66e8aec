"""The part of a training state that streams: none, unless a step does not fit otherwise, or is faster so.

Of some splits of optimizer state and gradients the one is taken with which step and update take least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from lmswap.capture.merge_programs import MergedPrograms
from lmswap.errors import PlanInfeasible, TierError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Link
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.cache import CachedPlan
from lmswap.reporting.text import format_seconds
from lmswap.session.allowance import Allowance
from lmswap.session.compiled_graph import Graphs, SavedSequence
from lmswap.session.context import ModelContext
from lmswap.session.diagnostics import Notes
from lmswap.session.planned_step import PlannedStep
from lmswap.session.planner import Planner
from lmswap.torch_compat.process_groups import is_distributed
from lmswap.training_state.updates import Updates

_SHARES = (0.25, 0.5, 0.75, 1.0)
_WORTH_STREAMING = 0.02  # of the step's seconds: less is within the error of predictions


class _Split(NamedTuple):
    """Bytes of optimizer state that stream, and whether gradients do."""

    state_bytes: int
    has_gradients: bool


class StateStreaming:
    """Gradients and optimizer state of one model: decides what of them streams, and states what that takes."""

    def __init__(
        self, context: ModelContext, planner: Planner, updates: Updates, graphs: Graphs, *, notes: Notes
    ) -> None:
        """``graphs`` are the model's; ``notes`` takes sentences for reports."""
        self._options, self._memory, self._budget = context.options, context.memory, context.budget
        self._machine, self._planner, self._updates = context.machine, planner, updates
        self._graphs, self._notes = graphs, notes

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state, and of gradients, in host copies; of other tensors that the CPU updates, too."""
        return self._updates.streamed_bytes + self._updates.gradient_bytes + self._copied_bytes_on_cpu

    @property
    def _copied_bytes_on_cpu(self) -> int:
        return sum(each.copied_bytes() for each in self._updates.on_cpu)

    def copied_bytes(self, step: PlannedStep | None) -> tuple[int, int]:
        """Return what an update after ``step``, and its backward, copy out and in beside its plan."""
        updates, added_bytes = self._updates, self._updates.gradients.added_bytes
        if updates.on_cpu:
            copied_bytes = self._copied_bytes_on_cpu
            return copied_bytes + updates.gradient_bytes, copied_bytes + added_bytes
        copied_bytes = self.nbytes
        if updates and step is not None:
            copied_bytes += _trained_bytes(step.plan, step.merged.program)
        return copied_bytes + updates.rewritten_bytes, copied_bytes + added_bytes

    def notes_on_cpu_updates(self, step: PlannedStep | None) -> Iterator[str]:
        """Yield a sentence for reports on updates on the CPU after ``step``, if they run there."""
        if step is None or not (on_cpu := self._updates.on_cpu):
            return
        link = step.machine.tier(self._options.tier).link
        predicted = sum(each.predicted_seconds for each in on_cpu)
        seconds = max(predicted, _update_seconds(link, self._copied_bytes_on_cpu))
        streamed_bytes = self._updates.streamed_bytes + self._updates.gradient_bytes
        streamed_bytes += _trained_bytes(step.plan, step.merged.program)
        measured = [each.measured_seconds for each in on_cpu if each.measured_seconds is not None]
        took = f" (the last took {format_seconds(sum(measured))})" if measured else ""
        yield (
            f"optimizer_device='cpu': parameters are updated on the CPU, with its bits, not the GPU's; predicted: "
            f"{format_seconds(seconds)} for each update{took}; on the GPU, with its bits, "
            f"{format_seconds(_update_seconds(link, streamed_bytes))} if all of the state streamed"
        )

    def with_streamed(self, merged: MergedPrograms) -> MergedPrograms:
        """Return ``merged`` without gradients that leave the step as soon as each is computed, if they stream.

        From the first step on they do if they can and updates run on the CPU.
        """
        gradients = self._updates.gradients
        if self._updates.on_cpu and not gradients.are_streamed and self._can_stream_gradients():
            gradients.stream()
        if not gradients.are_streamed:
            return merged
        return replace(merged, program=merged.program.with_gradients(BufferKind.ACCUMULATED_GRADIENT))

    def stream_more(self, program: Program, costs: OpCosts, planned: CachedPlan | None = None) -> bool:
        """Let more of the optimizer's state, and gradients, stream if the step is faster then; whether it is.

        ``planned`` is the plan of the step; None if none fits.
        """
        updates, is_fixed = self._updates, self._options.plan is not None
        if is_fixed or (split := self._best_split(program, costs, planned)) is None:
            return False
        updates.stream_state(split.state_bytes)
        if split.has_gradients:
            updates.gradients.stream()
        self._memory.trim()
        self._notes.append_once(
            f"optimizer state: {format_bytes(updates.streamed_bytes)} of {format_bytes(updates.state_bytes)}"
            f"{', and gradients,' * updates.gradients.are_streamed} are non-resident between updates; "
            f"each copies them in and out, and takes {format_bytes(updates.window_bytes())} for that"
        )
        return True

    def least_budget(self, step: PlannedStep) -> int:
        """Return the least budget found for ``step``, see `Planner.least_bytes`, also if more streams than now.

        It is for a process that begins with it, and has the full margin of first steps.
        """
        program = step.merged.program
        allowance = self._budget.moving(step.allowance.at_start(), program)
        least_bytes = self._planner.least_bytes(program, step.costs, allowance)
        if (split := self._largest_split(program, allowance)) is None:
            return least_bytes
        program, allowance = split
        return min(least_bytes, self._planner.least_bytes(program, step.costs, allowance, streams=True))

    def refusal_if_streamed(self, refusal: PlanInfeasible, program: Program, costs: OpCosts) -> PlanInfeasible:
        """Return ``refusal`` of a step, or that of the step if as much streams as can, if that needs less."""
        if (split := self._largest_split(program, self._budget.allowance(program, in_chunks=True))) is None:
            return refusal
        with suppress(TierError):
            if (streamed := self._planner.refusal(split[0], costs, split[1], streams=True)) is not None:
                return min(refusal, streamed, key=lambda each: each.needed_bytes)
        return refusal

    def _can_stream_gradients(self) -> bool:
        are_captured = self._options.compiler == "fx" and not any(isinstance(g, SavedSequence) for g in self._graphs)
        return are_captured and not self._options.verify and not is_distributed()

    def _best_split(self, program: Program, costs: OpCosts, planned: CachedPlan | None) -> _Split | None:
        """Return what of state and gradients to stream; None if more than now gains nothing.

        An update is assumed in each step, and that its copies run beside each other, but not beside the step.
        """
        updates, tier = self._updates, self._options.tier
        allowance = self._budget.allowance(program, in_chunks=True)
        best, best_seconds = None, float("inf")
        if planned is not None:
            link, plan = planned.machine.tier(tier).link, planned.plan
            best_seconds = plan.predicted_seconds + _update_seconds(link, _trained_bytes(plan, program))
            best_seconds *= 1 - _WORTH_STREAMING
        for split in self._splits():
            step, left = self._by(split, program, allowance)
            if left.step_bytes <= allowance.step_bytes and not split.has_gradients:
                continue
            found = self._planner.try_within(step, costs, left)
            if found is None:
                continue
            gradient_bytes = program.gradient_bytes * split.has_gradients
            more_bytes = split.state_bytes - updates.streamed_bytes + gradient_bytes
            target = found.machine.tier(tier)
            if split.state_bytes + gradient_bytes + found.plan.tier_bytes.get(tier, 0) > target.held_bytes:
                continue
            seconds = found.plan.predicted_seconds
            seconds += _update_seconds(target.link, more_bytes + _trained_bytes(found.plan, step))
            if seconds < best_seconds:
                best, best_seconds = split, seconds
            if not found.plan.moves:
                break  # a larger split gains nothing, and its updates take longer
        return best

    def _largest_split(self, program: Program, allowance: Allowance) -> tuple[Program, Allowance] | None:
        """Return the step, and what it may occupy, if as much streams as can: its budget can be the least.

        None if no more than now can, or the tier cannot hold it.
        """
        *_, split = (None, *self._splits())
        held_bytes = self._machine.now.tier(self._options.tier).held_bytes
        if split is None or split.state_bytes + program.gradient_bytes * split.has_gradients > held_bytes:
            return None
        return self._by(split, program, allowance)

    def _splits(self) -> Iterator[_Split]:
        """Yield splits with which more streams: gradients after all state, as they cost a backward copies, too.

        Where these stream already, there is more state of parameters that the optimizer was given later.
        """
        if not self._updates or self._updates.on_cpu:
            return
        total_bytes, streamed_bytes = self._updates.state_bytes, self._updates.streamed_bytes
        shares = (int(share * total_bytes) for share in _SHARES)
        yield from (_Split(nbytes, has_gradients=False) for nbytes in shares if nbytes > streamed_bytes)
        if not self._updates.gradients.are_streamed and self._can_stream_gradients():
            yield _Split(total_bytes, has_gradients=True)

    def _by(self, split: _Split, program: Program, allowance: Allowance) -> tuple[Program, Allowance]:
        """Return the step by ``split``, and what it may occupy."""
        updates, trained, update_bytes = self._updates, allowance.trained, 0
        window_bytes = updates.window_bytes(streams=True, streams_gradients=split.has_gradients)
        if allowance.reuses_step:
            window_bytes, update_bytes = 0, window_bytes
        more_bytes = split.state_bytes - updates.streamed_bytes
        freed_bytes = min(more_bytes, trained.optimizer_bytes + trained.pending_optimizer_bytes)
        freed_bytes += split.has_gradients * trained.gradient_bytes + allowance.window_bytes - window_bytes
        reserved_bytes = min(freed_bytes, allowance.optimizer_reserve_bytes, allowance.reserve_bytes)
        held_bytes = freed_bytes - reserved_bytes
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


def _trained_bytes(plan: Plan, program: Program) -> int:
    """Return the bytes of weights that ``plan`` moves and the optimizer updates."""
    trained = {parameter for parameter, _ in program.gradients}
    moved = {swap.buffer for swap in plan.swaps} & trained
    return sum(program.buffers[buffer].nbytes for buffer in moved if program.buffers[buffer].kind is BufferKind.WEIGHT)


def _update_seconds(link: Link, nbytes: int) -> float:
    """Return the seconds of copying ``nbytes`` in and out, while both directions are busy."""
    return max(link.out_rate.seconds(nbytes), link.in_rate.seconds(nbytes)) * 2 / link.both_rate
