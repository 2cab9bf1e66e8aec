"""A dictionary of weakly referenced objects by number.

Callbacks of the weak references are implemented in C: an exception raised in a Python callback, for example by a signal
handler, would be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Numbered(weakref.ref[_T]):
    __slots__ = ("number",)
    number: int


class WeakValues(Generic[_T]):
    """Weak references by number; `take_dead` removes the dead entries."""

    def __init__(self) -> None:
        self._references: dict[int, _Numbered[_T]] = {}
        self._dead: list[_Numbered[_T]] = []

    def __setitem__(self, number: int, item: _T) -> None:
        self._references[number] = reference = _Numbered(item, self._dead.append)
        reference.number = number

    def get(self, number: int | None) -> _T | None:
        """Return the object of that number, or None if it is dead or unknown."""
        reference = self._references.get(number) if number is not None else None
        return reference() if reference is not None else None

    def __iter__(self) -> Iterator[_T]:
        return (item for reference in self._references.values() if (item := reference()) is not None)

    def take_dead(self) -> Iterator[int]:
        """Yield the numbers of objects that died since the last call."""
        while self._dead:
            number = self._dead.pop().number
            del self._references[number]
            yield number
