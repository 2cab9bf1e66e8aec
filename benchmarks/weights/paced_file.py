"""Tensors in a file that is read and written at a given rate: where the tools beside lmswap keep them on a CPU."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmswap.hardware.disk import swap_directory

_REQUEST_BYTES = 4 * 2**20  # as lmswap's disk lanes


@dataclass(frozen=True)
class Stored:
    """A tensor in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.shape.numel() * self.dtype.itemsize


class PacedFile:
    """An unlinked file in lmswap's directory for such, whose copies follow lmswap's rule of an emulated link.

    A request takes its bytes over the rate, from when the link is free; the copy itself is part of that time. Copies go
    through the page cache, as lmswap's of host copies do. One thread at a time may use it.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._file, path = tempfile.mkstemp(dir=swap_directory())
        Path(path).unlink()
        weakref.finalize(self, os.close, self._file)
        self._rate, self._free_at, self._nbytes = bytes_per_second, 0.0, 0

    def store(self, tensor: Tensor) -> Stored:
        """Append the bytes of ``tensor``, which is contiguous, at no rate."""
        stored = Stored(self._nbytes, tensor.shape, tensor.dtype)
        view, offset = _bytes_of(tensor), self._nbytes
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written
        self._nbytes = offset
        return stored

    def write(self, stored: Stored, source: Tensor) -> None:
        """Replace the bytes of ``stored`` by those of ``source``, which is contiguous."""
        self._copy(stored, source, lambda view, offset: os.pwritev(self._file, [view], offset))

    def read(self, stored: Stored, target: Tensor) -> None:
        """Read ``stored`` into ``target``, which is contiguous."""
        self._copy(stored, target, lambda view, offset: os.preadv(self._file, [view], offset))

    def _copy(self, stored: Stored, tensor: Tensor, copy: Callable[[memoryview, int], int]) -> None:
        view, offset = _bytes_of(tensor), stored.offset
        while view:
            begun = max(time.monotonic(), self._free_at)
            count = copy(view[:_REQUEST_BYTES], offset)
            if not count:
                raise OSError("the file is shorter than what was written")
            self._free_at = begun + count / self._rate
            time.sleep(max(0.0, self._free_at - time.monotonic()))
            view, offset = view[count:], offset + count


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)
