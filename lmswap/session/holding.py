"""What of a step may its caller still hold while the next one runs? It lies beside the arena, perhaps twice."""

from __future__ import annotations

from collections.abc import Mapping

from lmswap.ir.program import BufferKind
from lmswap.session.trained import Trained

# How many of each kind may be there at once, from what is safest to what takes least. A loop forgets the outputs of one
# step when it has those of the next. Gradients are added to, or are there until the next backward, or until the step's
# end, and then they lie in the arena. Where there is room for no more, outputs do not meet perhaps.
_LEVELS: tuple[Mapping[BufferKind, int], ...] = (
    {BufferKind.OUTPUT: 2, BufferKind.GRADIENT: 2},
    {BufferKind.OUTPUT: 2, BufferKind.GRADIENT: 1},
    {BufferKind.OUTPUT: 2},
    {BufferKind.OUTPUT: 1},
)
_ADDED_TO, _UNTIL_BACKWARD, _UNTIL_END = range(3)


class Holding:
    """What plans reckon with: the most there may be, until steps have shown how much there is."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.level = _ADDED_TO  # the higher, the less
        self._seen, self._is_known = _UNTIL_END, False

    @property
    def num_held(self) -> Mapping[BufferKind, int]:
        """By kind how many tensors of it have to have memory at once."""
        return _LEVELS[self.level]

    def may_add_up(self, *, with_arena: bool) -> bool:
        """Whether gradients are added to those of the steps before, as far as steps have shown.

        A backward shows it. Where both have no room, a step does as well that begins with some: to hand gradients over
        that would have gone before the backward costs little.
        """
        is_certain = self._is_known or (with_arena and self.level == _ADDED_TO)
        return self._seen <= (_ADDED_TO if is_certain else _UNTIL_BACKWARD)

    def has_gradients(self) -> bool:
        """Whether gradients are there now, to which those of a backward would be added."""
        return self._trained.have_gradients()

    @property
    def is_short(self) -> bool:
        """Whether gradients are held for longer than there is room for."""
        return self._seen < min(self.level, _UNTIL_END)

    def look(self, *, in_backward: bool = False) -> None:
        """A step begins, or its backward does: are the last one's gradients still there?"""
        if not self._is_known and self._seen != _ADDED_TO and self._trained.have_gradients():
            self._seen = _ADDED_TO if in_backward else _UNTIL_BACKWARD

    def assume_less(self) -> bool:
        """There is no room for as much; whether less can be reckoned with, which is not what steps have shown."""
        less = self.level + 1
        can = less < len(_LEVELS) and not (self._is_known and self._seen < less <= _UNTIL_END)
        self.level += can
        return can

    def assume_seen(self) -> bool:
        """Steps have shown what is held; whether that is less than was reckoned with."""
        self._is_known = True
        is_less = self._seen > self.level
        self.level = max(self.level, self._seen)
        return is_less

    def assume_most(self) -> bool:
        """Something was held that should not have been; whether more can be reckoned with, once."""
        can = self.level > _ADDED_TO and self._seen != _ADDED_TO
        if can:
            self.level = self._seen = _ADDED_TO
            self._is_known = False
        return can
