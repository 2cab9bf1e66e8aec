"""The budget of one model on its device: its bytes, and what of the device's memory is in use outside of steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from lmswap.analyze.memory import StepMemory
from lmswap.capture.caller_memory import assumed_bytes
from lmswap.errors import OptionError, PlanInfeasible
from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.bytesize import format_bytes, min_share_taken
from lmswap.ir.costs import OpCosts
from lmswap.ir.fixed_memory import TrainedMemory, counted
from lmswap.ir.program import Program
from lmswap.options import Options
from lmswap.planner import KEEP_WHAT_FITS
from lmswap.runtime.arena import Arena
from lmswap.runtime.host_copies import HostCopies
from lmswap.session.allowance import GROWTH_BYTES, Allowance, Held
from lmswap.session.diagnostics import Notes
from lmswap.session.earlier_outputs import EarlierOutputs
from lmswap.torch_compat.process_groups import is_distributed
from lmswap.training_state.optimizer_memory import ASSUMED_VALUES, TrainableParameters
from lmswap.training_state.weights import Weights


class _Margin(NamedTuple):
    """Bytes that a plan leaves free: a fixed number, and more for each op that allocates."""

    fixed_bytes: int
    op_bytes: int = 0

    def of(self, program: Program) -> int:
        return self.fixed_bytes + self.op_bytes * sum(bool(op.writes) for op in program.ops)


_ON_CUDA = _Margin(32 * 2**20)  # what allocators round up
# On a CPU the growth of the process between planning and the end of the first steps: code, what compiling it a second
# time leaves, kernels' caches, threads and buffers of the tier. Peaks were over the prediction by 5 to 15 MiB in
# networks of 32 to 420 ops, by 40 MiB in a GPT of 1,644 (torch 2.13, Python 3.11).
_MARGIN = {"cpu": _Margin(16 * 2**20, 24 * 2**10), "cuda": _ON_CUDA}
# Without swaps and recomputes: by 1 to 4 MiB, and by 11.
_MARGIN_UNMOVED = {"cpu": _Margin(5 * 2**20, 5 * 2**10), "cuda": _ON_CUDA}
# Once growth is known, what compiling another plan leaves: at most 1 MiB.
_MARGIN_SETTLED = {"cpu": _Margin(2 * 2**20, 6 * 2**10), "cuda": _ON_CUDA}
# What torch.distributed takes for the first step of ranks: over gloo the peak was 30 MiB further over the prediction.
_JOINED_BYTES = {"cpu": 40 * 2**20, "cuda": 0}
# What else the first step allocates, in multiples of the parameters: on a GPU, where torch keeps released memory,
# optimizers update all of them at once, with a temporary value each; DistributedDataParallel rebuilds its buckets.
_UNDER_WAY, _REBUILT = 1, 1
# The share of free memory that "auto" takes; the rest is left to other users of the device.
_AUTO_SHARE = 0.9
# Of the budget, at most, for copies of weights in calls without a graph.
_READ_AHEAD_SHARE = 1 / 8
_AUTO = f"what was free when the model was enabled, less {1 - _AUTO_SHARE:.0%} for others"


class BudgetTracker:
    """The budget of one model on its device, and the allowances of its steps."""

    def __init__(
        self,
        options: Options,
        device_type: str,
        memory: DeviceMemory,
        trained: TrainableParameters,
        weights: Weights,
        *,
        notes: Notes,
        arena: Arena | None = None,
    ) -> None:
        """Resolve "auto" as a share of what is free now. An ``arena`` holds the tensors of steps, and nothing else.

        ``weights`` are parts of steps, ``notes`` takes sentences for reports.

        Raises:
            OptionError: the budget is more than the device has.
        """
        self.has_trained = False
        self._memory, self._trained, self._weights, self._arena = memory, trained, weights, arena
        self._read_ahead_bytes = 0  # that steps without a graph take for copies of weights
        self._first_run_bytes, self._first_runs_in = 0, 0  # that ops will leave, in the step of this number
        self._outside_bytes = 0  # the most that steps have taken outside of the arena
        self.held, self.earlier_outputs = Held(0), EarlierOutputs()
        self._num_freed = 0  # segments, when the probed step began
        self._device_type, self._policy = device_type, options.policy
        # Of growth, what existed at its start is no part.
        self._uncounted = trained.measure() if device_type == "cpu" else TrainedMemory()
        self._fragments = device_type == "cuda" and arena is None  # the CPU's heap remaps pages instead
        self._reuses_step = device_type == "cpu"  # else updates find an arena, or fragments
        self._share, self._notes, self._max_peak_bytes = options.budget_share, notes, 0
        self._share_note = ""  # what the share is in bytes now
        total_bytes, free_bytes = memory.total_bytes(), memory.free_bytes()
        # The bytes of "auto", which limit a share.
        self.max_bytes = int(_AUTO_SHARE * (free_bytes + memory.used_bytes()))
        self.nbytes = self.max_bytes if options.budget_bytes is None else options.budget_bytes
        if options.budget_bytes is not None and self.nbytes > total_bytes:
            raise OptionError(
                f"budget {format_bytes(self.nbytes)} is more than the device has ({format_bytes(total_bytes)})"
            )
        if options.budget_bytes is None and self._share is None:
            notes.append(f"budget 'auto' is {format_bytes(self.nbytes)} ({self.counted}): {_AUTO}")

    @property
    def counted(self) -> str:
        """What the budget counts, and from when."""
        return counted(self._device_type, parameters=self._weights.is_managed)

    def close_arena(self) -> None:
        """From now on torch's allocator places the tensors of steps."""
        self._arena, self._fragments = None, True

    def read_ahead_bytes(self, weights: Collection[torch.UntypedStorage], *, is_planned: bool) -> int:
        """Return what copies of ``weights`` that calls without a graph read may occupy, of what is free now.

        That is room for the largest two: one is read while the next is copied. If the call ``is_planned``, plans that
        are made later leave it free.
        """
        largest_bytes = max((weight.nbytes() for weight in weights), default=0)
        nbytes = min(2 * largest_bytes, int(_READ_AHEAD_SHARE * self.nbytes))
        if is_planned:
            self._read_ahead_bytes = nbytes
        return min(nbytes, self.nbytes - self._memory.used_bytes())

    def take_share(self, program: Program, costs: OpCosts, planned: Allowance) -> Allowance:
        """Return ``planned``, the allowance of a step of ``program``, by a share of the largest step so far.

        A note says so if that changes the budget; without effect on a budget that is no share.
        """
        peak_bytes = 0 if self._share is None else StepMemory(program, costs).peak.nbytes
        if self._share is None or peak_bytes <= self._max_peak_bytes:
            return planned
        self._max_peak_bytes, fixed_bytes = peak_bytes, planned.fixed_bytes
        self.nbytes = min(fixed_bytes + int(self._share * peak_bytes), self.max_bytes)
        at_most = f"; but no more than {_AUTO}" if self.nbytes == self.max_bytes else ""
        self._note_share(
            f"budget '{100 * self._share:g}%' is {format_bytes(self.nbytes)}: {100 * self._share:g} % of the "
            f"{format_bytes(peak_bytes)} that the step's tensors take unplanned, and the {format_bytes(fixed_bytes)} "
            f"that all else took when it was planned, margin for swaps included; it stays if that shrinks{at_most}"
        )
        return replace(planned, budget_bytes=self.nbytes)

    def widen(self, planned: Allowance, refusal: PlanInfeasible) -> bool:
        """Take the least budget that works, as ``refusal`` says, instead of a share that is too small; whether it can.

        It cannot if the budget is no share, or the device has less.
        """
        needed_bytes = refusal.needed_bytes
        if self._share is None or not planned.budget_bytes < needed_bytes <= self.max_bytes:
            return False
        self.nbytes = max(self.nbytes, needed_bytes)
        self._note_share(min_share_taken(self._share, self._share_of(needed_bytes, planned), refusal))
        return True

    def _note_share(self, note: str) -> None:
        """Note what the share is now, in place of what it was."""
        self._notes.supersede(self._share_note, note)
        self._share_note = note

    def shares(self, needed_bytes: int, planned: Allowance) -> tuple[float, float] | None:
        """Return the given per cent and those of ``needed_bytes``; None if the budget is no share."""
        return None if self._share is None else (100 * self._share, 100 * self._share_of(needed_bytes, planned))

    def _share_of(self, needed_bytes: int, planned: Allowance) -> float:
        return (needed_bytes - planned.fixed_bytes) / self._max_peak_bytes

    def allowance(self, program: Program, *, in_chunks: bool = False) -> Allowance:
        """Return what a step of ``program`` may occupy now; negative if the rest exceeds the budget.

        ``in_chunks``: as if updates ran in chunks.
        """
        trains = _trains(program)
        placeable = self._weights.placeable()
        weight_bytes = placeable.resident_bytes  # the plan keeps or moves them
        base_bytes = self._used_outside(weight_bytes)
        tensor_bytes = self._tensors_outside(weight_bytes)
        trained = self.trained_memory()
        parameter_bytes = max(0, trained.parameter_bytes - placeable.parameter_bytes)
        trained = trained._replace(parameter_bytes=parameter_bytes)
        optimizer_bytes = trained.pending_optimizer_bytes if trains else 0
        in_chunks |= self.updates_in_chunks
        reserve_bytes = self._reserve_bytes(program, base_bytes, optimizer_bytes, in_chunks=in_chunks) if trains else 0
        reserve_bytes += self._read_ahead_bytes + self._first_run_bytes
        margin_bytes = _MARGIN[self._device_type].of(program) + self._joined_bytes()
        window_bytes, update_bytes = self._update_memory(program)
        return Allowance(
            self.nbytes,
            base_bytes,
            tensor_bytes,
            reserve_bytes,
            margin_bytes,
            trained=trained,
            optimizer_reserve_bytes=min(optimizer_bytes, reserve_bytes),
            window_bytes=window_bytes,
            reuses_step=self._reuses_step,
            update_bytes=update_bytes,
            streams_gradients=trains and self._reuses_step and self._trained.streams_gradients,
            earlier_output_bytes=self.earlier_output_bytes if trains else 0,
            device_type=self._device_type,
            counts_parameters=self._weights.is_managed,
        )

    def trained_memory(self) -> TrainedMemory:
        """Measure parameters, and what the budget counts of their gradients and of optimizer state."""
        # Once steps have run, an optimizer that is not known has none, or has allocated it.
        found = self._trained.measure(assumed_values=0 if self.has_trained else ASSUMED_VALUES)
        uncounted = self._uncounted
        return found._replace(
            pending_optimizer_bytes=found.pending_optimizer_bytes - self._reused_bytes(),
            gradient_bytes=max(0, found.gradient_bytes - uncounted.gradient_bytes),
            optimizer_bytes=max(0, found.optimizer_bytes - uncounted.optimizer_bytes),
        )

    @property
    def assumes_optimizer(self) -> bool:
        """Whether the reserve for optimizer state is a guess, as parameters have no optimizer yet."""
        return not self.has_trained and self._trained.lack_optimizer()

    def count_all_state(self) -> int:
        """Count gradients and optimizer state that existed when the budget began, too; return their bytes."""
        uncounted, self._uncounted = self._uncounted, TrainedMemory()
        return uncounted.gradient_bytes + uncounted.optimizer_bytes

    @property
    def updates_in_chunks(self) -> bool:
        """Whether updates run in chunks, which fetch what is non-resident."""
        return self._trained.updated_in_chunks is not None

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients are non-resident between backwards."""
        return self._trained.streams_gradients

    def absent_gradient_bytes(self, program: Program) -> int:
        """Return the bytes of gradients of ``program`` that will be on the device, and parameters do not have now."""
        if self.streams_gradients:
            return 0
        return max(0, program.gradient_bytes - self._trained.gradient_bytes())

    def unmoved(self, planned: Allowance, program: Program, *, streams: bool = False) -> Allowance:
        """Return ``planned`` for a step of ``program`` without swaps and recomputes, which grows by less.

        Unchanged if the model's policy moves tensors even if all of them fit. ``streams``: optimizer state would.
        """
        if planned.is_unmoved or self._policy not in KEEP_WHAT_FITS:
            return planned
        updates = self._trained.updated_in_chunks
        if updates is not None and not (streams or updates.streams_any or updates.limit_temporaries):
            planned = replace(planned.with_window(0), update_bytes=updates.whole_bytes)
        return replace(planned, planned_margin_bytes=self.unmoved_margin_bytes(program), is_unmoved=True)

    def moving(self, planned: Allowance, program: Program) -> Allowance:
        """Return ``planned`` for a step of ``program`` that swaps or recomputes, the inverse of `unmoved`."""
        if not planned.is_unmoved:
            return planned
        window_bytes, update_bytes = self._update_memory(program)
        return replace(
            planned.with_window(window_bytes),
            planned_margin_bytes=_MARGIN[self._device_type].of(program) + self._joined_bytes(),
            update_bytes=update_bytes,
            is_unmoved=False,
        )

    def _update_memory(self, program: Program) -> tuple[int, int]:
        """Return what the update after ``program`` takes, and gives back: of a reserve, and of the step's memory."""
        if not _trains(program):
            return 0, 0
        if self._reuses_step and not self.updates_in_chunks:
            nbytes = self._trained.update_bytes(expects_optimizer=not self.has_trained)
            for note in self._trained.unmeasured:
                self._notes.append_once(note)
            return 0, nbytes
        return self._window_bytes() - self._reused_bytes(), self._reused_bytes()

    def _window_bytes(self) -> int:
        """Return what updates take of the device beside what is resident, and give back."""
        updates = self._trained.updated_in_chunks
        return updates.window_bytes() if updates is not None else 0

    def _reused_bytes(self) -> int:
        """Return what updates take of memory that the step has given back."""
        return self._window_bytes() if self._reuses_step else 0

    def unmoved_margin_bytes(self, program: Program) -> int:
        """Return the margin of first steps of ``program`` that move nothing, or are not the first of their trace."""
        return _MARGIN_UNMOVED[self._device_type].of(program) + self._joined_bytes()

    def settled_margin_bytes(self, program: Program) -> int:
        """Return the margin of steps of ``program`` whose growth is known."""
        return _MARGIN_SETTLED[self._device_type].of(program)

    def _joined_bytes(self) -> int:
        return _JOINED_BYTES[self._device_type] if is_distributed() else 0

    def _reserve_bytes(self, program: Program, base_bytes: int, optimizer_bytes: int, *, in_chunks: bool) -> int:
        """Return what a training step will take outside of its plan: optimizer and, outside of an arena, loss.

        ``optimizer_bytes`` are those of state that does not exist yet.
        """
        if self.has_trained:
            return max(optimizer_bytes, self._outside_bytes - base_bytes if self._arena is not None else 0)
        coming_bytes = optimizer_bytes + _REBUILT * is_distributed() * self._trained.nbytes
        if self._arena is None:
            return coming_bytes
        under_way_bytes = 0 if in_chunks else _UNDER_WAY * self._trained.nbytes
        return coming_bytes + max(under_way_bytes, assumed_bytes(program))

    def make_room(self, host_copies: HostCopies) -> None:
        """Decommit free memory so that the pages of ``host_copies`` that the caller maps are within the budget, too."""
        left_bytes = self.nbytes - self._memory.used_bytes()
        if left_bytes >= host_copies.max_mapped_bytes:  # whatever their bytes, of which a sum takes time
            return
        excess_bytes = host_copies.mapped_bytes(host_copies.nbytes) - left_bytes
        if excess_bytes > 0:
            self._memory.decommit(excess_bytes)

    def has_run(self) -> None:
        """Measure, between two steps, what the last training step left outside of the arena."""
        self.has_trained = True
        if self._arena is not None:
            self._outside_bytes = self._used_outside()

    def start_reserve_probe(self) -> None:
        """Begin to probe what the next step takes outside of an arena, see `end_reserve_probe`."""
        if self._arena is not None:
            self._trained.start_watching_optimizer()
            self._num_freed = self._arena.num_segments_freed()

    def _used_outside(self, weight_bytes: int | None = None) -> int:
        """Return what is in use outside of steps; ``weight_bytes`` are parts of them, by default what plans keep.

        Nothing is, if the process has freed more of what it had before.
        """
        arena_bytes = self._arena.reserved_bytes if self._arena else 0
        return max(0, self._memory.used_bytes() - arena_bytes - self._in_steps(weight_bytes))

    def _tensors_outside(self, weight_bytes: int | None = None) -> int:
        arena_bytes = self._arena.tensor_bytes if self._arena else 0
        return max(0, self._memory.used_tensor_bytes() - arena_bytes - self._in_steps(weight_bytes))

    def _in_steps(self, weight_bytes: int | None) -> int:
        """Return what is in use now and counted as part of steps."""
        output_bytes = self.earlier_outputs.held_bytes if self._arena is None else 0
        return output_bytes + (self._weights.kept_bytes if weight_bytes is None else weight_bytes)

    @property
    def earlier_output_bytes(self) -> int:
        """The bytes of outputs of the step before that are part of the forward of the one under way."""
        return self.earlier_outputs.begun_bytes if self._arena is None else 0

    def expect_first_runs(self, nbytes: int, number: int) -> None:
        """Reserve ``nbytes`` that ops will leave as they run in step ``number``: another process has timed them."""
        self._first_run_bytes, self._first_runs_in = self._first_run_bytes + nbytes, number

    def begin_step(self, number: int) -> None:
        """Measure the tensors outside of the step, see `held`."""
        if number > self._first_runs_in:
            self._first_run_bytes = 0
        nbytes = self._tensors_outside()
        more_bytes = nbytes - self.held.nbytes
        came = (more_bytes, number - 1) if more_bytes > GROWTH_BYTES else (self.held.came_bytes, self.held.came_in)
        self.held = Held(nbytes, *came)

    def in_use_bytes(self, coming_bytes: int) -> int:
        """Return what is in use outside of steps now.

        ``coming_bytes`` will be allocated again: small tensors, see `DeviceMemory.min_counted_bytes`, and gradients.
        """
        used_bytes = self._used_outside()
        if self._arena is not None:  # torch keeps what updates give back
            return used_bytes - min(self._window_bytes(), max(0, used_bytes - self._tensors_outside()))
        return used_bytes - self._memory.reusable_bytes() + coming_bytes

    def fragmented_bytes(self, peak_bytes: int) -> int:
        """Return by how much a step's peak exceeds the budget where only fragmentation causes that."""
        return max(0, peak_bytes - self.nbytes) if self._fragments else 0

    def end_reserve_probe(self, planned: Allowance) -> int:
        """End the probe; return the bytes of ``planned``'s reserve that the probed step has shown not to be needed.

        It shows that if an optimizer ran in it, and torch kept all released memory. A budget that is a share includes
        the reserve, and stays as it was reported.
        """
        were_stepped = self._trained.stop_and_check_stepped()
        if self._arena is None or self._share is not None or not were_stepped:
            return 0
        if self._arena.num_segments_freed() != self._num_freed:
            return 0
        taken_bytes = max(0, max(self._outside_bytes, self._used_outside()) - planned.found_bytes)
        unused_bytes = planned.reserve_bytes - taken_bytes - self._trained.measure().pending_optimizer_bytes
        return unused_bytes if unused_bytes > GROWTH_BYTES else 0


def _trains(program: Program) -> bool:
    return any(segment.phase == "backward" for segment in program.segments)
