"""The split of a budget: what is in use before a step, what it takes outside of its plan, and what is left to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from lmswap.ir.fixed_memory import FixedMemory, TrainedMemory
from lmswap.planner.cache import PlannedMemory

# Growth of what is in use before the step that is not worth replanning for. Where the margin is smaller than in the
# first steps, `Allowance.slack_bytes` is less.
GROWTH_BYTES = 8 * 2**20
# The part of the margin that stays free at least until the growth it is reserved for is known.
_STEADY_MARGIN_BYTES = 10 * 2**20


class Held(NamedTuple):
    """Bytes of tensors outside of a step when it began; the last increase, and the step in or after which it came."""

    nbytes: int
    came_bytes: int = 0
    came_in: int = 0


_UNKNOWN = TrainedMemory()


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
    drift_bytes: int = 0  # change since then that the margin absorbs: predicted, and no cause to replan
    spared_reserve_bytes: int = 0  # that steps have shown not to need; `reserve_bytes` is what is left
    spared_margin_bytes: int = 0  # by which the margin shrank when growth was known
    ahead_bytes: int = 0  # left free for growth to come, once it has recurred
    trained: TrainedMemory = _UNKNOWN  # when what is in use was measured last
    optimizer_reserve_bytes: int = 0  # the part of the planned reserve that is for optimizer state
    window_bytes: int = 0  # the part of the reserve that updates take and give back: state that exists is no part of it
    reuses_step: bool = False  # updates take memory that the step's tensors have given back; not from an arena
    update_bytes: int = 0  # what they take of that, beside the window
    streams_gradients: bool = False  # in memory that the step's tensors leave
    earlier_output_bytes: int = 0  # of the step before, which the caller holds until the forward has returned
    device_type: str = ""
    counts_parameters: bool = False
    is_unmoved: bool = False  # the margin and reserve are those of a step that neither swaps nor recomputes

    @property
    def kept_reserve_bytes(self) -> int:
        """The part of the reserve that may be in use between steps, too."""
        return max(0, self.reserve_bytes - self.window_bytes)

    @property
    def base_bytes(self) -> int:
        """Bytes in use before the step."""
        return self.found_bytes + self.grown_bytes + self.drift_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes that stay free: until growth is known, it is subtracted from the planned margin down to a minimum."""
        free_bytes = self.ahead_bytes - self.drift_bytes
        if self.settled_margin_bytes is not None:
            return self.settled_margin_bytes + free_bytes
        least_bytes = min(_STEADY_MARGIN_BYTES, self.planned_margin_bytes)
        return max(least_bytes, self.planned_margin_bytes - self.grown_bytes) + free_bytes

    @property
    def slack_bytes(self) -> int:
        """Change of what is in use, or excess of a plan, that is no cause to replan: at most half of the margin."""
        return min(GROWTH_BYTES, self.margin_bytes // 2)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that the step's own tensors may not occupy."""
        return self.base_bytes + self.reserve_bytes + self.margin_bytes + self.fragmented_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that the step's own tensors may occupy."""
        return self.budget_bytes - self.fixed_bytes

    @property
    def account(self) -> FixedMemory:
        """What is in use, reserved and left free; state that optimizers have allocated is no longer reserved for."""
        return FixedMemory(
            before_bytes=self.base_bytes + self._allocated_reserve_bytes,
            reserve_bytes=self.reserve_bytes - self._allocated_reserve_bytes,
            margin_bytes=self.margin_bytes,
            unmoved_margin_bytes=self.margin_bytes,
            device_type=self.device_type,
            counts_parameters=self.counts_parameters,
            **self.trained._asdict(),
        )

    @property
    def _allocated_reserve_bytes(self) -> int:
        """The part of the reserve that is optimizer state by now."""
        allocated_bytes = max(0, self.optimizer_reserve_bytes - self.trained.pending_optimizer_bytes)
        return min(allocated_bytes, self.reserve_bytes)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts of `fixed_bytes`, by their names in reports."""
        return (*self.account.parts(), ("fragmented", self.fragmented_bytes))

    @property
    def spared_bytes(self) -> int:
        """Bytes of reserve and margin that steps have shown not to need."""
        return self.spared_reserve_bytes + self.spared_margin_bytes

    @property
    def room(self) -> PlannedMemory:
        """The memory that a plan within this allowance is made for."""
        return PlannedMemory(
            self.step_bytes,
            self.spared_reserve_bytes,
            self.spared_margin_bytes,
            self.update_bytes,
            self.streams_gradients,
            self.earlier_output_bytes,
        )

    def sparing(self, nbytes: int) -> Allowance:
        """Return it with ``nbytes`` less of reserve, which are not needed."""
        return replace(self, reserve_bytes=self.reserve_bytes - nbytes, spared_reserve_bytes=nbytes)

    def settled(self, margin_bytes: int) -> Allowance:
        """Return it for known growth, with ``margin_bytes`` free at most: what is less in use now is a part of them."""
        planned_bytes = self.margin_bytes - self.ahead_bytes + self.drift_bytes
        margin_bytes = min(planned_bytes, max(margin_bytes // 2, margin_bytes + min(0, self.drift_bytes)))
        spared_bytes = self.spared_margin_bytes + planned_bytes - margin_bytes
        return replace(self, settled_margin_bytes=margin_bytes, spared_margin_bytes=spared_bytes)

    def at_start(self) -> Allowance:
        """Return it as before the first step, for the next process."""
        trained = self.trained._replace(
            optimizer_bytes=max(0, self.trained.optimizer_bytes - self._allocated_reserve_bytes),
            pending_optimizer_bytes=self.optimizer_reserve_bytes,
        )
        unsettled = replace(self, settled_margin_bytes=None, spared_margin_bytes=0)
        return replace(unsettled, grown_bytes=0, drift_bytes=0, fragmented_bytes=0, ahead_bytes=0, trained=trained)

    def with_held(self, nbytes: int) -> Allowance:
        """Return it with ``nbytes`` more held outside of the step, taken from `ahead_bytes` first."""
        return replace(
            self,
            found_bytes=self.found_bytes + nbytes,
            tensor_bytes=self.tensor_bytes + nbytes,
            ahead_bytes=max(0, self.ahead_bytes - nbytes),
        )

    def with_window(self, nbytes: int) -> Allowance:
        """Return it with a reserve of ``nbytes`` for what updates take and give back."""
        more_bytes = nbytes - self.window_bytes
        return replace(
            self,
            reserve_bytes=max(0, self.reserve_bytes + more_bytes),
            optimizer_reserve_bytes=max(0, self.optimizer_reserve_bytes + more_bytes),
            window_bytes=nbytes,
        )

    def with_growth(self, in_use_bytes: int, over_bytes: int = 0) -> Allowance:
        """Return it for ``in_use_bytes`` between steps, and a step whose peak exceeded the budget by ``over_bytes``.

        Less in use than when the step was planned leaves the step no more: it may be allocated again.
        """
        return replace(
            self,
            grown_bytes=max(0, in_use_bytes - self.found_bytes - self.kept_reserve_bytes),
            drift_bytes=max(-self.found_bytes, min(0, in_use_bytes - self.found_bytes - self._allocated_reserve_bytes)),
            fragmented_bytes=self.fragmented_bytes + over_bytes,
        )

    def drifted(self, nbytes: int) -> Allowance:
        """Return it for ``nbytes`` more, or less, in use between steps, as far as the margin absorbs that."""
        return replace(self, drift_bytes=min(nbytes, self.margin_bytes + self.drift_bytes))

    def of_step_bytes(self, nbytes: int) -> Allowance:
        """Return it with a budget that leaves ``nbytes`` to the step's own tensors."""
        return replace(self, budget_bytes=self.fixed_bytes + nbytes)
