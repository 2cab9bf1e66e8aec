"""Tracks which saved storages are resident when an op of a recorded step begins.

The cost per event is proportional to what changes and to what has other owners, not to all that is saved: a resident
storage owned by saved tensors alone stays so until it is unpacked or dies. Of many storages with other owners, such as
outputs collected by a training loop, those held longest are assumed to stay resident, too.
"""

from __future__ import annotations

from typing import NamedTuple

from lmswap.saved_tensors.saved_storage import SavedStorage
from lmswap.saved_tensors.weak_values import WeakValues

# Limit of storages with other owners that are examined at each event, and named by each op of the program.
_MAX_EXAMINED = 64
_NO_NUMBERS = frozenset[int]()


class Residency(NamedTuple):
    """Storages in use, by number; bytes of those kept resident; and which of the newly kept ones others still hold."""

    used: frozenset[int]
    kept_bytes: int
    held: frozenset[int]


class ResidencyTracker:
    """Tracks the storages of one step."""

    def __init__(self, storages: WeakValues[SavedStorage], kept: set[int]) -> None:
        """``kept``: numbers of storages kept resident though saved tensors alone own them.

        Those that others hold for too long are added.
        """
        self._storages, self._kept = storages, kept
        # By number, latest last: possibly resident, possibly with other owners.
        self._watched: dict[int, None] = {}
        self._kept_bytes_of: dict[int, int] = {}  # bytes by number: no other owners, kept resident
        self._kept_bytes = 0
        self._originals: dict[int, int] = {}  # bytes by number that only verification keeps on the device
        self.verification_bytes = 0  # their sum
        for storage in storages:
            self.note_released(storage)
        self.watch_all()

    def watch(self, storage: SavedStorage) -> int:
        """Track ``storage``, which may have other owners from now on; return its bytes if it was kept, else 0."""
        self._watched.pop(storage.number, None)
        self._watched[storage.number] = None
        return self._forget(storage.number)

    def ignore(self, number: int) -> None:
        """Track that storage no longer: it is resident for as long as a copy of it is under way."""
        self._watched.pop(number, None)

    def note_released(self, storage: SavedStorage) -> None:
        """Note that the memory of ``storage`` may have been released, apart from what verification keeps."""
        if storage.number not in self._originals and (nbytes := storage.verification_bytes):
            self._originals[storage.number] = nbytes
            self.verification_bytes += nbytes

    def watch_all(self) -> None:
        """Track all storages."""
        self._kept_bytes_of.clear()
        self._kept_bytes = 0
        self._watched.update((storage.number, None) for storage in self._storages)

    def observe(self) -> Residency:
        """Return what is resident now."""
        for number in self._storages.take_dead():
            self._watched.pop(number, None)
            self._forget(number)
            self.verification_bytes -= self._originals.pop(number, 0)
        used: list[SavedStorage] = []
        for number in tuple(self._watched):
            storage = self._storages.get(number)
            if storage is None or not storage.is_on_device:
                del self._watched[number]
            elif number in self._kept and storage.can_swap_out():
                self._keep(storage)
            else:
                used.append(storage)
        held = _NO_NUMBERS
        if len(used) > _MAX_EXAMINED:
            # Storages kept by a plan that the step has left have no other owners, and the next plan may swap them out.
            keeping = [storage for storage in used[:-_MAX_EXAMINED] if not storage.can_swap_out()]
            for storage in keeping:
                self._keep(storage)
            held = frozenset([storage.number for storage in keeping])
        return Residency(frozenset([storage.number for storage in used]) - held, self._kept_bytes, held)

    def _keep(self, storage: SavedStorage) -> None:
        del self._watched[storage.number]
        self._kept.add(storage.number)
        self._kept_bytes_of[storage.number] = storage.nbytes
        self._kept_bytes += storage.nbytes

    def _forget(self, number: int) -> int:
        nbytes = self._kept_bytes_of.pop(number, 0)
        self._kept_bytes -= nbytes
        return nbytes
