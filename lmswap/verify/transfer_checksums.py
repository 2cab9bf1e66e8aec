"""Checksums of every transfer at both of its ends, and poisoning of released memory.

::

    device ── copy out ──► tier ··· stored ··· tier ── copy in ──► device
    left                   written             read                arrived

The first two checksums that differ show where the bytes were changed. Released memory is filled with 0xff, NaN in every
floating-point type: a source from when compute has waited for its swap-out, a target until compute has waited for its
swap-in. Nothing here waits for a copy before compute does: that would hide a missing wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmswap.errors import BytesChanged, TransferError
from lmswap.runtime import _C
from lmswap.runtime.engine import Describe
from lmswap.verify.summary import Verified

POISON = 0xFF
_CHUNK_BYTES = 2**20  # of one sum, as in the engine
_CHUNKS_AT_ONCE = 32
_ODD = 0x9E3779B1


@dataclass
class _SwappedOut:
    """A buffer that was swapped out."""

    buffer: int
    out: int  # the transfer
    first: int  # of its bytes in their storage
    nbytes: int
    left: torch.Tensor
    written: list[int] | None = None
    failed: str = ""  # why ``written``, which can be read once, is missing; an exception would keep frames alive


class Audit:
    """The checks of one engine's transfers, counted in ``verified``."""

    def __init__(self, native: _C.Engine, verified: Verified, describe: Describe) -> None:
        self._native, self._verified, self._describe = native, verified, describe
        self._swapped_out: dict[int, _SwappedOut] = {}  # by handle
        self._staging: dict[int, torch.Tensor] = {}  # by transfer: where its bytes go until it is waited for

    def out_queued(self, handle: int, buffer: int, storage: torch.UntypedStorage, first: int, nbytes: int) -> None:
        """Note that the swap-out of ``nbytes`` from byte ``first`` of ``storage`` has been queued."""
        left = checksums(_bytes(storage, first, nbytes))
        self._swapped_out[handle] = _SwappedOut(buffer, self._native.out_transfer(handle), first, nbytes, left)

    def out_waited(self, handle: int, storage: torch.UntypedStorage) -> None:
        """Poison the source: compute waits for the swap-out from here on, and the memory is released."""
        record = self._swapped_out[handle]
        self._poison(_bytes(storage, record.first, record.nbytes))

    def staging(self, flat: torch.Tensor) -> torch.Tensor:
        """Return separate memory for the swap-in, so that ``flat`` is poisoned until compute has waited for it."""
        self._poison(flat)
        return torch.full_like(flat, POISON)

    def in_queued(self, transfer: int, staging: torch.Tensor) -> None:
        """Note that the swap-in to ``staging`` has been queued."""
        self._staging[transfer] = staging

    def in_waited(self, handle: int, transfer: int, flat: torch.Tensor) -> None:
        """Compare all checksums once compute waits for the swap-in: before an op can read a corrupted index.

        Raises:
            BytesChanged: they differ.
        """
        record, staged = self._swapped_out[handle], self._staging.pop(transfer)
        arrived = checksums(staged[: record.nbytes])
        flat.copy_(staged)
        self._compare_out(record)
        read = self._native.take_checksums(transfer)
        self._compare(record, "in the tier", record.written, read)
        self._compare(record, "on the way in", read, arrived.tolist())
        self._count(record)

    def forget(self) -> None:
        """Compare the swap-outs that were never swapped in, and drop all records; nothing may be non-resident."""
        self._staging.clear()
        dropped, self._swapped_out = self._swapped_out, {}
        for record in dropped.values():
            try:
                self._compare_out(record)
            except TransferError:
                continue

    def _compare_out(self, record: _SwappedOut) -> None:
        if record.failed:
            raise TransferError(record.failed)
        if record.written is None:
            try:
                record.written = self._native.take_checksums(record.out)
            except TransferError as error:
                record.failed = str(error)
                raise
            self._compare(record, "on the way out", record.left.tolist(), record.written)
            self._count(record)

    def _compare(self, record: _SwappedOut, where: str, before: list[int] | None, after: list[int]) -> None:
        if before == after:
            return
        assert before is not None
        self._verified.num_differences += 1
        chunk = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        raise BytesChanged(*self._describe(record.buffer), record.nbytes, where, chunk * _CHUNK_BYTES)

    def _count(self, record: _SwappedOut) -> None:
        self._verified.num_transfers += 1
        self._verified.transferred_bytes += record.nbytes

    def _poison(self, flat: torch.Tensor) -> None:
        flat.fill_(POISON)
        self._verified.num_poisoned += 1
        self._verified.poisoned_bytes += flat.numel()


def checksums(flat: torch.Tensor) -> torch.Tensor:
    """Return one sum for each begun MiB of ``flat``, on its device.

    The engine computes the same of a tier's bytes: csrc/include/lmswap/checksum.h.
    """
    if flat.storage_offset() % 4 or flat.data_ptr() % 4:
        flat = flat.clone()
    whole = flat.numel() // _CHUNK_BYTES * _CHUNK_BYTES
    factors = (2 * torch.arange(_CHUNK_BYTES // 4, device=flat.device) + 1) * _ODD & 0xFFFFFFFF
    chunks = flat[:whole].view(-1, _CHUNK_BYTES)
    parts = [_sums(chunks[i : i + _CHUNKS_AT_ONCE], factors) for i in range(0, len(chunks), _CHUNKS_AT_ONCE)]
    if whole < flat.numel():
        rest = flat.new_zeros(1, _CHUNK_BYTES)
        rest[0, : flat.numel() - whole] = flat[whole:]
        parts.append(_sums(rest, factors))
    return torch.cat(parts)


def _sums(chunks: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    words = chunks.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)  # unsigned
    return words.mul_(factors).sum(1)


def _bytes(storage: torch.UntypedStorage, first: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (nbytes,), (1,))
