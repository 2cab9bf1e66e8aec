"""Objects by number, for as long as somebody else holds them.

Their weak references call nothing that is written in Python: an exception raised there, as by a signal's handler, would
be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Numbered(weakref.ref[_T]):
    __slots__ = ("number",)
    number: int


class Alive(Generic[_T]):
    """A dictionary of weak references whose dead entries are dropped by `take_dead`."""

    def __init__(self) -> None:
        self._references: dict[int, _Numbered[_T]] = {}
        self._dead: list[_Numbered[_T]] = []

    def __setitem__(self, number: int, item: _T) -> None:
        self._references[number] = reference = _Numbered(item, self._dead.append)
        reference.number = number

    def get(self, number: int | None) -> _T | None:
        """The object of that number, if it is alive."""
        reference = self._references.get(number) if number is not None else None
        return reference() if reference is not None else None

    def __iter__(self) -> Iterator[_T]:
        return (item for reference in self._references.values() if (item := reference()) is not None)

    def take_dead(self) -> Iterator[int]:
        """The numbers of objects that died since the last call."""
        while self._dead:
            number = self._dead.pop().number
            del self._references[number]
            yield number
