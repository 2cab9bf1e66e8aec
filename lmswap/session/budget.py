"""Splits a budget into what is in use before a step, what it will take outside of its plan, and what is left to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from lmswap.analyze.memory import StepMemory
from lmswap.capture.caller_memory import assumed_bytes
from lmswap.capture.numerics.gradient_order import is_distributed
from lmswap.errors import OptionError
from lmswap.execute.arena import Arena
from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import Program
from lmswap.options import Options
from lmswap.plan import KEEP_WHAT_FITS
from lmswap.plan.cache import PlannedMemory
from lmswap.session.diagnostics import Notes
from lmswap.session.optimizer_memory import TrainableParameters


class _Margin(NamedTuple):
    """Bytes that a plan leaves free: a fixed number, and more for each op that allocates."""

    fixed_bytes: int
    op_bytes: int = 0

    def of(self, program: Program) -> int:
        return self.fixed_bytes + self.op_bytes * sum(bool(op.writes) for op in program.ops)


_ON_CUDA = _Margin(32 * 2**20)  # what allocators round up
# On a CPU the growth of the process between planning and the end of the first steps: code, and what compiling it a
# second time leaves, kernels' caches, threads and buffers of the tier. Peaks of first steps were over the prediction by
# 14, 15, 27, 29 and 33 MiB in networks of 61, 123, 164, 164 and 420 ops, by 57, 121 and 115 MiB in GPTs of 1,631 and
# 3,262 and a ResNet of 3,302 (torch 2.13, Python 3.11).
_MARGIN = {"cpu": _Margin(24 * 2**20, 40 * 2**10), "cuda": _ON_CUDA}
# Without swaps and recomputes: by 8, 8 and 16 MiB in networks of 61, 164 and 420 ops.
_MARGIN_UNMOVED = {"cpu": _Margin(8 * 2**20, 20 * 2**10), "cuda": _ON_CUDA}
# Once growth is known, what replanning adds: 6 MiB for 164 ops, 9 for 420.
_MARGIN_SETTLED = {"cpu": _Margin(6 * 2**20, 8 * 2**10), "cuda": _ON_CUDA}
# What torch.distributed takes for the first step of ranks: over gloo the peak was 30 MiB further over the prediction.
_JOINED_BYTES = {"cpu": 40 * 2**20, "cuda": 0}
# Growth of what is in use before the step that does not cause replanning: a part of the margin.
GROWTH_BYTES = 8 * 2**20
# The part of the margin that stays free at least until the growth it is reserved for is known.
_STEADY_MARGIN_BYTES = 24 * 2**20
# What else the first step allocates, in multiples of the parameters: on a GPU, where torch keeps released memory,
# optimizers update all of them at once, with a temporary value each; DistributedDataParallel rebuilds its buckets.
_UNDER_WAY, _REBUILT = 1, 1
# The share of free memory that "auto" takes; the rest is left to other users of the device.
_AUTO_SHARE = 0.9
_AUTO = f"what was free when the model was enabled, less {1 - _AUTO_SHARE:.0%} for others"


class Held(NamedTuple):
    """Bytes of tensors outside of a step when it began; the last increase, and the step in or after which it came."""

    nbytes: int
    came_bytes: int = 0
    came_in: int = 0


@dataclass(frozen=True)
class Allowance:
    """The split of a budget: in use before the step, reserved outside of it, margin, and what the step may use."""

    budget_bytes: int
    found_bytes: int  # in use when the step was planned
    tensor_bytes: int  # the part of it that tensors hold
    reserve_bytes: int
    planned_margin_bytes: int
    grown_bytes: int = 0  # growth of what is in use between steps since then
    settled_margin_bytes: int | None = None  # that still has to stay free once growth is known
    fragmented_bytes: int = 0  # beyond the budget, by fragmentation
    spared_bytes: int = 0  # of reserve and margin that steps have shown not to need
    ahead_bytes: int = 0  # left free for growth to come, once it has recurred

    @property
    def base_bytes(self) -> int:
        """Bytes in use before the step."""
        return self.found_bytes + self.grown_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes that stay free: until growth is known, it is subtracted from the planned margin down to a minimum."""
        if self.settled_margin_bytes is not None:
            return self.settled_margin_bytes + self.ahead_bytes
        least_bytes = min(_STEADY_MARGIN_BYTES, self.planned_margin_bytes)
        return max(least_bytes, self.planned_margin_bytes - self.grown_bytes) + self.ahead_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes that the step's own tensors may not occupy."""
        return self.base_bytes + self.reserve_bytes + self.margin_bytes + self.fragmented_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that the step's own tensors may occupy."""
        return self.budget_bytes - self.fixed_bytes

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts of `fixed_bytes`, by their names in reports."""
        return (
            ("before the step", self.base_bytes),
            ("reserve", self.reserve_bytes),
            ("margin", self.margin_bytes),
            ("fragmented", self.fragmented_bytes),
        )

    @property
    def room(self) -> PlannedMemory:
        """The memory that a plan within this allowance is made for."""
        return PlannedMemory(self.step_bytes, self.spared_bytes)

    def sparing(self, nbytes: int) -> Allowance:
        """Return it with ``nbytes`` less of reserve, which are not needed."""
        return replace(self, reserve_bytes=self.reserve_bytes - nbytes, spared_bytes=nbytes)

    def settled(self, margin_bytes: int) -> Allowance:
        """Return it for known growth, with a margin of at most ``margin_bytes``."""
        planned_bytes = self.margin_bytes - self.ahead_bytes
        margin_bytes = min(planned_bytes, margin_bytes)
        spared_bytes = self.spared_bytes + planned_bytes - margin_bytes
        return replace(self, settled_margin_bytes=margin_bytes, spared_bytes=spared_bytes)

    def at_start(self) -> Allowance:
        """Return it as before the first step, for the next process."""
        return replace(self, grown_bytes=0, settled_margin_bytes=None, fragmented_bytes=0, ahead_bytes=0)

    def with_held(self, nbytes: int) -> Allowance:
        """Return it with ``nbytes`` more held outside of the step, taken from `ahead_bytes` first."""
        return replace(
            self,
            found_bytes=self.found_bytes + nbytes,
            tensor_bytes=self.tensor_bytes + nbytes,
            ahead_bytes=max(0, self.ahead_bytes - nbytes),
        )

    def ahead(self, nbytes: int) -> Allowance:
        """Return it with ``nbytes`` left free for growth to come."""
        return replace(self, ahead_bytes=nbytes)


class BudgetTracker:
    """The budget of one model on its device, and the allowances of its steps."""

    def __init__(
        self,
        options: Options,
        device_type: str,
        memory: DeviceMemory,
        trained: TrainableParameters,
        *,
        notes: Notes,
        arena: Arena | None = None,
    ) -> None:
        """Resolve "auto" as a share of what is free now. An ``arena`` holds the tensors of steps, and nothing else.

        ``notes`` takes sentences for reports.

        Raises:
            OptionError: the budget is more than the device has.
        """
        self.has_trained = False  # the optimizer's state exists
        self._memory, self._trained, self._arena = memory, trained, arena
        self._outside_bytes = 0  # the most that steps have taken outside of the arena
        self.held = Held(0)
        self._num_freed = 0  # segments, when the probed step began
        self._device_type, self._policy = device_type, options.policy
        self._fragments = device_type == "cuda" and arena is None  # the CPU's heap remaps pages instead
        self._share, self._notes, self._most_peak_bytes = options.budget_share, notes, 0
        total_bytes, free_bytes = memory.total_bytes(), memory.free_bytes()
        self._auto_bytes = int(_AUTO_SHARE * (free_bytes + memory.used_bytes()))
        self.nbytes = self._auto_bytes if options.budget_bytes is None else options.budget_bytes
        if options.budget_bytes is not None and self.nbytes > total_bytes:
            raise OptionError(
                f"budget {format_bytes(self.nbytes)} is more than the device has ({format_bytes(total_bytes)})"
            )
        if options.budget_bytes is None and self._share is None:
            notes.append(f"budget 'auto' is {format_bytes(self.nbytes)}: {_AUTO}")

    @property
    def most_bytes(self) -> int:
        """The bytes of "auto", which limit a share."""
        return self._auto_bytes

    def leave_arena(self) -> None:
        """From now on torch's allocator places the tensors of steps."""
        self._arena, self._fragments = None, True

    def _take_share(self, share: float, peak_bytes: int, fixed_bytes: int) -> None:
        """Set the budget to a ``share`` of the unplanned peak, if it is the largest so far, plus all else."""
        if peak_bytes <= self._most_peak_bytes:
            return
        self._most_peak_bytes = peak_bytes
        self.nbytes = min(fixed_bytes + int(share * peak_bytes), self._auto_bytes)
        at_most = f"; but no more than {_AUTO}" if self.nbytes == self._auto_bytes else ""
        given = f"{100 * share:g}%"
        self._notes.append(
            f"budget '{given}' is {format_bytes(self.nbytes)}: so much of {format_bytes(peak_bytes)} that "
            f"the step's tensors take unplanned, and {format_bytes(fixed_bytes)} for all else{at_most}"
        )

    def widened(self, planned: Allowance, needed_bytes: int) -> Allowance | None:
        """Return ``planned`` with the least budget that works instead of a share that is too small.

        None if the budget is no share, or the device has less.
        """
        if self._share is None or not planned.budget_bytes < needed_bytes <= self._auto_bytes:
            return None
        self.nbytes = max(self.nbytes, needed_bytes)
        given, least = self._shares(self._share, needed_bytes, planned)
        self._notes.append(
            f"budget '{given:g}%' is too small for this step: the least that works, "
            f"{math.ceil(10 * least) / 10:g}%, is taken, {format_bytes(needed_bytes)}"
        )
        return replace(planned, budget_bytes=self.nbytes)

    def shares(self, needed_bytes: int, planned: Allowance) -> tuple[float, float] | None:
        """Return the given per cent and those of ``needed_bytes``; None if the budget is no share."""
        return None if self._share is None else self._shares(self._share, needed_bytes, planned)

    def _shares(self, share: float, needed_bytes: int, planned: Allowance) -> tuple[float, float]:
        return 100 * share, 100 * (needed_bytes - planned.fixed_bytes) / self._most_peak_bytes

    def allowance(self, program: Program, costs: OpCosts) -> Allowance:
        """Return what a step of ``program`` may occupy now; negative if the rest exceeds the budget.

        A budget that is a share refers to the largest step so far, this one included.
        """
        self._memory.trim()  # timing the ops leaves pages for reuse, which do not stay in use
        base_bytes, tensor_bytes = self._used_outside(), self._tensors_outside()
        trains = any(segment.phase == "backward" for segment in program.segments)
        reserve_bytes = self._reserve_bytes(program, base_bytes) if trains else 0
        margin_bytes = _MARGIN[self._device_type].of(program) + self._joined_bytes()
        allowance = Allowance(self.nbytes, base_bytes, tensor_bytes, reserve_bytes, margin_bytes)
        if self._share is not None:
            self._take_share(self._share, StepMemory(program, costs).peak.nbytes, allowance.fixed_bytes)
        return replace(allowance, budget_bytes=self.nbytes)

    def unmoved(self, planned: Allowance, program: Program) -> Allowance:
        """Return ``planned`` for a step of ``program`` without swaps and recomputes, which grows by less.

        Unchanged if the model's policy moves tensors even if all of them fit.
        """
        if self._policy not in KEEP_WHAT_FITS:
            return planned
        margin_bytes = _MARGIN_UNMOVED[self._device_type].of(program) + self._joined_bytes()
        return replace(planned, planned_margin_bytes=margin_bytes)

    def settled(self, planned: Allowance, program: Program) -> Allowance:
        """Return ``planned`` with the margin of steps of ``program`` whose growth is known."""
        return planned.settled(_MARGIN_SETTLED[self._device_type].of(program))

    def _joined_bytes(self) -> int:
        return _JOINED_BYTES[self._device_type] if is_distributed() else 0

    def _reserve_bytes(self, program: Program, base_bytes: int) -> int:
        """Return what a training step will take outside of its plan: optimizer and, outside of an arena, loss."""
        if self.has_trained:
            return max(0, self._outside_bytes - base_bytes) if self._arena is not None else 0
        coming_bytes = self._trained.pending_optimizer_bytes() + _REBUILT * is_distributed() * self._trained.nbytes
        if self._arena is None:
            return coming_bytes
        return coming_bytes + max(_UNDER_WAY * self._trained.nbytes, assumed_bytes(program))

    def has_run(self) -> None:
        """Measure, between two steps, what the last training step left outside of the arena."""
        self.has_trained = True
        if self._arena is not None:
            self._outside_bytes = self._used_outside()

    def start_reserve_probe(self) -> None:
        """Begin to probe what the next step takes outside of an arena, see `release_unused_reserve`."""
        if self._arena is not None:
            self._trained.start_watching_optimizer()
            self._num_freed = self._arena.num_segments_freed()

    def _used_outside(self) -> int:
        return self._memory.used_bytes() - (self._arena.reserved_bytes if self._arena else 0)

    def _tensors_outside(self) -> int:
        return self._memory.used_tensor_bytes() - (self._arena.tensor_bytes if self._arena else 0)

    def begin_step(self, number: int) -> None:
        """Measure the tensors outside of the step, see `held`."""
        nbytes = self._tensors_outside()
        more_bytes = nbytes - self.held.nbytes
        came = (more_bytes, number - 1) if more_bytes > GROWTH_BYTES else (self.held.came_bytes, self.held.came_in)
        self.held = Held(nbytes, *came)

    def excess_held_bytes(self, planned: Allowance) -> int:
        """Return how many bytes more than ``planned`` tensors outside of the step hold: kept gradients, averages."""
        return self.held.nbytes - planned.tensor_bytes - planned.reserve_bytes

    def with_growth(self, planned: Allowance, small_bytes: int, peak_bytes: int) -> Allowance:
        """Return ``planned`` with the growth since then between steps, and the excess of a step's peak over the budget.

        ``small_bytes`` of small tensors, see `DeviceMemory.counted_from_bytes`, will be allocated again.
        """
        if self._arena is not None:
            in_use_bytes, over_bytes = self._used_outside(), 0
        else:
            in_use_bytes = self._memory.used_bytes() - self._memory.reusable_bytes() + small_bytes
            over_bytes = max(0, peak_bytes - self.nbytes) if self._fragments else 0
        return replace(
            planned,
            grown_bytes=max(0, in_use_bytes - planned.found_bytes - planned.reserve_bytes),
            fragmented_bytes=planned.fragmented_bytes + over_bytes,
        )

    def release_unused_reserve(self, planned: Allowance) -> Allowance:
        """Return ``planned`` without the reserve that the probed step did not use, if it shows that.

        It does if an optimizer ran in it, and torch kept all released memory. A budget that is a share includes the
        reserve, and stays as it was reported.
        """
        were_stepped = self._trained.stop_and_check_stepped()
        if self._arena is None or self._share is not None or not were_stepped:
            return planned
        if self._arena.num_segments_freed() != self._num_freed:
            return planned
        taken_bytes = max(0, max(self._outside_bytes, self._used_outside()) - planned.found_bytes)
        spared_bytes = planned.reserve_bytes - taken_bytes - self._trained.pending_optimizer_bytes()
        return planned.sparing(spared_bytes) if spared_bytes > GROWTH_BYTES else planned
