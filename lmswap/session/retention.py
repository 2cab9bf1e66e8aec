"""Estimates which outputs and gradients the training loop keeps alive across steps.

They are allocated outside the arena; the plan reserves up to two copies of each until observed steps show that fewer
are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

from lmswap.ir.program import BufferKind


class Retention(IntEnum):
    """What a plan assumes the caller to hold, from the safest to the smallest.

    A loop releases the outputs of one step when it has those of the next. Gradients are accumulated, or live until the
    next backward, or until the step's end: then they are in the arena. If memory is shorter still, outputs of two steps
    are assumed not to overlap.
    """

    ACCUMULATED = 0
    UNTIL_BACKWARD = 1
    UNTIL_STEP_END = 2
    NO_OVERLAP = 3

    @property
    def num_held(self) -> Mapping[BufferKind, int]:
        """Copies of each kind that need memory at once."""
        return _NUM_HELD[self]


_NUM_HELD: Mapping[Retention, Mapping[BufferKind, int]] = {
    Retention.ACCUMULATED: {BufferKind.OUTPUT: 2, BufferKind.GRADIENT: 2},
    Retention.UNTIL_BACKWARD: {BufferKind.OUTPUT: 2, BufferKind.GRADIENT: 1},
    Retention.UNTIL_STEP_END: {BufferKind.OUTPUT: 2},
    Retention.NO_OVERLAP: {BufferKind.OUTPUT: 1},
}


class RetentionEstimate:
    """What plans assume the caller to hold: the most possible, until steps have shown how much it is."""

    def __init__(self, have_gradients: Callable[[], bool]) -> None:
        """``have_gradients`` returns whether any trained parameter has a gradient now."""
        self.have_gradients = have_gradients
        self.assumed = Retention.ACCUMULATED
        self._seen, self._is_known = Retention.UNTIL_STEP_END, False

    def may_accumulate(self, *, with_arena: bool) -> bool:
        """Whether gradients are added to those of earlier steps, as far as steps have shown.

        A backward shows it. If there is no room for both sets, so does a step that begins with gradients: accumulating
        into gradients that would have been released before the backward costs little.
        """
        is_certain = self._is_known or (with_arena and self.assumed is Retention.ACCUMULATED)
        return self._seen <= (Retention.ACCUMULATED if is_certain else Retention.UNTIL_BACKWARD)

    @property
    def is_short(self) -> bool:
        """Whether gradients are held for longer than plans assume."""
        return self._seen < min(self.assumed, Retention.UNTIL_STEP_END)

    @property
    def choices(self) -> tuple[Retention, ...]:
        """What a plan may assume: what is assumed now, then fewer and fewer, as far as steps have not refuted it."""
        choices = [self.assumed]
        for fewer in map(Retention, range(self.assumed + 1, len(Retention))):
            if self._is_known and self._seen < fewer <= Retention.UNTIL_STEP_END:
                break
            choices.append(fewer)
        return tuple(choices)

    def observe(self, *, in_backward: bool = False) -> None:
        """Observe, when a step or its backward begins, whether gradients of the last step still exist."""
        if not self._is_known and self._seen is not Retention.ACCUMULATED and self.have_gradients():
            self._seen = Retention.ACCUMULATED if in_backward else Retention.UNTIL_BACKWARD

    def assume(self, retention: Retention) -> None:
        """Assume ``retention``, one of `choices`, from now on: a plan that was activated relies on it."""
        self.assumed = retention

    def confirm(self) -> None:
        """Assume what steps have shown from now on, if that is less than before."""
        self._is_known = True
        self.assumed = max(self.assumed, self._seen)

    def assume_most(self) -> bool:
        """Assume the most, once, after a tensor was held unexpectedly; whether that changes anything."""
        can = self.assumed > Retention.ACCUMULATED and self._seen is not Retention.ACCUMULATED
        if can:
            self.assumed = self._seen = Retention.ACCUMULATED
            self._is_known = False
        return can
