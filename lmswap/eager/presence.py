"""The saved storages that are on the device as an op of a recorded step begins.

An event takes time for what changes and for what others hold, not for all that is saved: a storage that stays on the
device, and that saved tensors alone hold, remains so until it is taken back or dies. Of many that others hold, such as
the outputs that a loop collects, those that are held for longest are taken to stay, too.
"""

from __future__ import annotations

from typing import NamedTuple

from lmswap.eager.alive import Alive
from lmswap.eager.saved import SavedStorage

# So many that others hold are looked at in each event, and named by each op of the program.
_MOST_USED = 64


class Present(NamedTuple):
    """Storages in use by others, by number, the bytes of those that stay, and which of these others still held."""

    used: frozenset[int]
    stayed_bytes: int
    held: frozenset[int]


class Presence:
    """Follows the storages of one step."""

    def __init__(self, storages: Alive[SavedStorage], staying: set[int]) -> None:
        """``staying`` are the numbers of those that are to stay on the device though saved tensors alone hold them.

        Those that others hold for too long are added to it.
        """
        self._storages, self._staying = storages, staying
        # By number, the latest last: what may be on the device, and may be held by others.
        self._watched: dict[int, None] = {}
        self._stayed: dict[int, int] = {}  # bytes by number: what others gave up, and stays
        self._stayed_bytes = 0
        self.watch_all()

    def watch(self, storage: SavedStorage) -> int:
        """Others may hold ``storage`` from now on; returns the bytes by which it was among those that stayed."""
        self._watched.pop(storage.number, None)
        self._watched[storage.number] = None
        return self._forget(storage.number)

    def watch_all(self) -> None:
        """The same for all storages."""
        self._stayed.clear()
        self._stayed_bytes = 0
        self._watched.update((storage.number, None) for storage in self._storages)

    def look(self) -> Present:
        """What is on the device now."""
        for number in self._storages.take_dead():
            self._watched.pop(number, None)
            self._forget(number)
        used: list[SavedStorage] = []
        for number in tuple(self._watched):
            storage = self._storages.get(number)
            if storage is None or not storage.is_on_device:
                del self._watched[number]
            elif number in self._staying and storage.may_leave():
                self._take_to_stay(storage)
            else:
                used.append(storage)
        # What a plan kept that the step has left is used by nobody, and may leave by the next one.
        held = [storage for storage in used[:-_MOST_USED] if not storage.may_leave()]
        for storage in held:
            self._take_to_stay(storage)
        held_numbers = frozenset(storage.number for storage in held)
        numbers = frozenset(storage.number for storage in used) - held_numbers
        return Present(numbers, self._stayed_bytes, held_numbers)

    def _take_to_stay(self, storage: SavedStorage) -> None:
        del self._watched[storage.number]
        self._staying.add(storage.number)
        self._stayed[storage.number] = storage.nbytes
        self._stayed_bytes += storage.nbytes

    def _forget(self, number: int) -> int:
        nbytes = self._stayed.pop(number, 0)
        self._stayed_bytes -= nbytes
        return nbytes
