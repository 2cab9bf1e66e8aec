"""An engine in plain Python, driven as the real one is, whose copies run as late as waits allow; it can be broken.

A copy out reads device memory when compute waits for it, and is in the tier when a copy in waits for that, or at the
end. A copy in writes device memory when compute waits for it. So code that forgets to wait is always too early, whereas
with a real engine it often is not, by luck.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from lmswap.verify.transfer_checksums import checksums


@dataclass
class Breakage:
    """What is wrong with the engine. ``damage`` flips a bit of the n-th buffer: "out", "away" or "in"."""

    release_waits: bool = True
    in_start_waits_for_out: bool = True
    in_done_waits: bool = True
    has_own_places: bool = True
    damage: str = ""
    damaged: int = 1


class LateEngine:
    """Stands in for `lmswap.runtime._C.Engine`, of which it has what `SwapEngine` and `Session` call."""

    def __init__(self, breakage: Breakage) -> None:
        self._broken = breakage
        self._number = 0
        self._tier: dict[int, bytearray] = {}  # by place
        self._outs: dict[int, tuple[int, int]] = {}  # handle -> pointer, nbytes
        self._sums: dict[int, Callable[[], list[int]]] = {}
        self._pending: dict[int, list[Callable[[], None]]] = {}  # transfer -> what it has yet to do

    def open_disk_tier(self, directory: str, limit_bytes: int) -> None:
        pass

    def reserve(self, tier: str, nbytes: int) -> None:
        pass

    def tier_stats(self, tier: str) -> SimpleNamespace:
        nbytes = sum(map(len, self._tier.values()))
        return SimpleNamespace(capacity_bytes=nbytes, used_bytes=nbytes, peak_used_bytes=nbytes, reserve_seconds=0.0)

    def out_start(  # noqa: PLR0917 - as the real one
        self, swap: int, tier: str, offset: int, pointer: int, nbytes: int, stream: int
    ) -> object:
        handle = self._next()
        staging = bytearray(nbytes)
        self._outs[handle] = (pointer, nbytes)
        place = handle if self._broken.has_own_places else 0
        self._tier.setdefault(place, bytearray(nbytes))

        def leave() -> None:
            staging[:] = ctypes.string_at(pointer, nbytes)

        def land() -> None:
            self._tier[place][:nbytes] = staging
            self._damage("out", handle)

        self._pending[-handle] = [leave, land]
        self._sums[-handle] = lambda: self._sum(-handle, handle)
        return torch.utils.dlpack.to_dlpack(torch.tensor([handle]))

    def out_done(self, handle: int, stream: int) -> None:
        if self._broken.release_waits:
            self._run(-handle, leave_last=1)

    def in_start(self, swap: int, handle: int, pointer: int, nbytes: int, stream: int) -> int:
        transfer = self._next()
        if self._broken.in_start_waits_for_out:
            self._run(-handle)
            sums = self._sum(-handle, handle)
            self._sums[-handle] = lambda: sums
        self._damage("away", handle)
        read = bytes(self._tier[handle if self._broken.has_own_places else 0][: self._outs[handle][1]])
        self._pending[transfer] = [lambda: ctypes.memmove(pointer, read, len(read))]
        self._sums[transfer] = lambda: self._sum(transfer, handle)
        if self._broken.damage == "in" and self._broken.damaged == handle:
            self._pending[transfer].append(lambda: _flip(pointer))
        return transfer

    def in_done(self, handle: int, transfer: int, stream: int) -> None:
        if self._broken.in_done_waits:
            self._run(transfer)

    def confirm(self) -> None:
        pass

    def forget_unconfirmed(self) -> None:
        pass

    def take_checksums(self, transfer: int) -> list[int]:
        return self._sums.pop(transfer)()

    def out_transfer(self, handle: int) -> int:
        return -handle

    def nbytes(self, handle: int) -> int:
        return self._outs[handle][1]

    def is_finished(self, transfer: int) -> bool:
        return not self._pending.get(transfer)

    def take_records(self) -> list[object]:
        return []

    def can_hold(self) -> bool:
        return False

    def mark(self, stream: int) -> int:
        return 0

    def take_mark(self, mark: int) -> float:
        return 0.0

    def forget_records(self, stop_seconds: float) -> None:
        pass

    def forget_marks(self, marks: list[int]) -> None:
        pass

    def live_handles(self) -> int:
        return len(self._outs)

    def close(self) -> None:
        pass

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _run(self, transfer: int, leave_last: int = 0) -> None:
        todo = self._pending[transfer]
        while len(todo) > leave_last:
            todo.pop(0)()

    def _sum(self, transfer: int, handle: int) -> list[int]:
        if transfer < 0:  # a copy out; memory that a copy in was to go to may be gone
            self._run(transfer)
        place = self._tier[handle if self._broken.has_own_places else 0]
        return checksums(torch.frombuffer(place[: self._outs[handle][1]], dtype=torch.uint8)).tolist()

    def _damage(self, where: str, handle: int) -> None:
        if self._broken.damage == where and self._broken.damaged == handle:
            self._tier[handle][0] ^= 1


def _flip(pointer: int) -> None:
    byte = ctypes.c_uint8.from_address(pointer)
    byte.value ^= 1
