"""Estimates which outputs and gradients the training loop keeps alive across steps.

They are allocated outside the arena; the plan reserves up to two copies of each until observed steps show that fewer
are needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmswap.ir.program import BufferKind
from lmswap.session.optimizer_memory import TrainableParameters

# How many of each kind may be alive at once, from the safest to the smallest. A loop releases the outputs of one step
# when it has those of the next. Gradients are accumulated, or live until the next backward, or until the step's end:
# then they are in the arena. If memory is shorter still, outputs of two steps are assumed not to overlap.
_LEVELS: tuple[Mapping[BufferKind, int], ...] = (
    {BufferKind.OUTPUT: 2, BufferKind.GRADIENT: 2},
    {BufferKind.OUTPUT: 2, BufferKind.GRADIENT: 1},
    {BufferKind.OUTPUT: 2},
    {BufferKind.OUTPUT: 1},
)
_ADDED_TO, _UNTIL_BACKWARD, _UNTIL_END = range(3)


class RetentionEstimate:
    """What plans assume the caller to hold: the most possible, until steps have shown how much it is."""

    def __init__(self, trained: TrainableParameters) -> None:
        self._trained = trained
        self.level = _ADDED_TO  # the higher, the fewer
        self._seen, self._is_known = _UNTIL_END, False

    @property
    def num_held(self) -> Mapping[BufferKind, int]:
        """Copies of each kind that need memory at once."""
        return _LEVELS[self.level]

    def may_accumulate(self, *, with_arena: bool) -> bool:
        """Whether gradients are added to those of earlier steps, as far as steps have shown.

        A backward shows it. If there is no room for both sets, so does a step that begins with gradients: accumulating
        into gradients that would have been released before the backward costs little.
        """
        is_certain = self._is_known or (with_arena and self.level == _ADDED_TO)
        return self._seen <= (_ADDED_TO if is_certain else _UNTIL_BACKWARD)

    def has_gradients(self) -> bool:
        """Whether gradients exist now, to which those of a backward would be added."""
        return self._trained.have_gradients()

    @property
    def is_short(self) -> bool:
        """Whether gradients are held for longer than plans assume."""
        return self._seen < min(self.level, _UNTIL_END)

    def observe(self, *, in_backward: bool = False) -> None:
        """Observe, when a step or its backward begins, whether gradients of the last step still exist."""
        if not self._is_known and self._seen != _ADDED_TO and self._trained.have_gradients():
            self._seen = _ADDED_TO if in_backward else _UNTIL_BACKWARD

    def lower(self) -> bool:
        """Assume that fewer are held, for lack of memory; whether that is possible and not refuted by steps."""
        less = self.level + 1
        can = less < len(_LEVELS) and not (self._is_known and self._seen < less <= _UNTIL_END)
        self.level += can
        return can

    def confirm(self) -> bool:
        """Assume what steps have shown from now on; whether that is less than before."""
        self._is_known = True
        is_less = self._seen > self.level
        self.level = max(self.level, self._seen)
        return is_less

    def raise_(self) -> bool:
        """Assume the most, once, after a tensor was held unexpectedly; whether that changes anything."""
        can = self.level > _ADDED_TO and self._seen != _ADDED_TO
        if can:
            self.level = self._seen = _ADDED_TO
            self._is_known = False
        return can
