"""The C++ engine as graphs use it: tensors in, tokens out; one per enabled model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Protocol

import torch

from lmswap.errors import BytesChanged, BytesDiffer, OptionError
from lmswap.runtime import _C, ops
from lmswap.runtime.arena import Arena
from lmswap.runtime.host_copies import HostCopies
from lmswap.runtime.recorder import Recorder, TensorMemory
from lmswap.runtime.streams import Streams
from lmswap.torch_compat.tensors import from_dlpack

# Returns, by the number under which a buffer is moved, its name and what makes it, for reports.
Describe = Callable[[int], tuple[str, str]]
_numbers = itertools.count(1)


class TransferAudit(Protocol):
    """Checks of all transfers of an engine, called in this order; see `lmswap.verify.transfer_checksums`."""

    def out_queued(self, handle: int, buffer: int, storage: torch.UntypedStorage, first: int, nbytes: int) -> None:
        """Note that the swap-out of ``nbytes`` from byte ``first`` of ``storage`` has been queued."""

    def out_waited(self, handle: int, storage: torch.UntypedStorage) -> None:
        """Note that compute waits for the swap-out: the memory is released."""

    def staging(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the memory to which to swap in what `in_waited` then copies to ``flat``."""

    def in_queued(self, transfer: int, staging: torch.Tensor) -> None:
        """Note that the swap-in to ``staging`` has been queued."""

    def in_waited(self, handle: int, transfer: int, flat: torch.Tensor) -> None:
        """Note that compute waits for the swap-in.

        Raises:
            BytesChanged: these are not the bytes swapped out.
        """

    def forget(self) -> None:
        """Drop all records; nothing is non-resident."""


class SwapEngine:
    """Moves whole storages between ``device`` and its tiers.

    It holds the tensors of transfers under way, so that an exception in mid-step cannot free memory that a copy still
    reads or writes; `reap_finished_transfers` drops them once the copy has ended.
    """

    def __init__(
        self,
        device: torch.device,
        native: _C.Engine,
        memory: TensorMemory,
        *,
        tier: str,
        describe: Describe,
        audit: TransferAudit | None = None,
        arena: Arena | None = None,
    ) -> None:
        """``tier`` keeps host copies. ``arena``: where swap-ins are allocated, if the plan has offsets for them."""
        self.device, self.native = device, native
        self._describe, self._tier = describe, tier
        self._audit = audit
        self.number, self._process, self._is_closed = next(_numbers), os.getpid(), False
        self.arena = arena
        self._in_flight: dict[int, torch.Tensor] = {}  # by transfer: the tensor that it reads or writes
        self._starting: dict[int, torch.Tensor] = {}  # by id, until the number of the transfer is known
        self._swap_in_of: dict[int, int] = {}  # by handle: the transfer of its swap-in
        self._weight_in_of: dict[int, tuple[int, int]] = {}  # by address of its target: handle, transfer
        self.streams = Streams(device)
        self._stream = self.streams.current
        self.host_copies = HostCopies(native, tier, device, self._stream)
        self.recorder = Recorder(native, memory, self._stream)
        ops.ENGINES[self.number] = self

    def out_start(self, x: torch.Tensor, buffer: int, tier: str, offset: int, is_whole: bool) -> torch.Tensor:
        """Queue the swap-out of ``x``'s storage to ``tier``.

        Args:
            x: a tensor on the device.
            buffer: the number in records.
            tier: the tier's name.
            offset: in the tier, in bytes.
            is_whole: copy ``x``'s own bytes only: a compiler may have placed it in a larger storage.

        Returns:
            The token, one int64 on the CPU, the only owner of the tier's bytes.

        Raises:
            TierError: the tier's limit, or what the machine has, does not allow for these bytes.
        """
        storage = x.untyped_storage()
        first, nbytes = 0, int(storage.nbytes())
        if is_whole:
            first, nbytes = int(x.storage_offset()) * x.element_size(), x.numel() * x.element_size()
        self._starting[id(x)] = x  # a signal handler may raise before the copy has a number
        capsule = self.native.out_start(buffer, tier, offset, storage.data_ptr() + first, nbytes, self._stream())
        token = from_dlpack(capsule)
        handle = int(token)
        self._in_flight[self.native.out_transfer(handle)] = x
        self._starting.pop(id(x), None)  # another thread's `reap_finished_transfers` may have dropped it already
        self.recorder.note_tier_bytes(self.native.tier_stats(tier).used_bytes)
        if self._audit is not None:
            self._audit.out_queued(handle, buffer, storage, first, nbytes)
        self.recorder.sample_memory()
        return token

    def out_done(self, token: torch.Tensor, x: torch.Tensor) -> None:
        """Make compute wait for the swap-out; ``x`` has no later use, and its memory is free from here on.

        Raises:
            TransferError: the copy failed.
        """
        self.wait_out(token)
        if self._audit is not None:
            self._audit.out_waited(int(token), x.untyped_storage())

    def wait_out(self, token: torch.Tensor) -> None:
        """Make compute wait for the swap-out of a tensor that others may still use.

        Raises:
            TransferError: the copy failed.
        """
        handle = int(token)
        self.native.out_done(handle, self._stream())
        self._in_flight.pop(self.native.out_transfer(handle), None)
        self.recorder.sample_memory()

    def in_start(self, token: torch.Tensor, buffer: int, device: torch.device) -> torch.Tensor:
        """Allocate device memory, queue the swap-in, and return the memory: uint8, one element a byte swapped out."""
        handle = int(token)
        # The bytes swapped out, not those traced: an operator may make a storage of another size than its fake kernel.
        nbytes = self.native.nbytes(handle)
        flat = self._allocate(nbytes, device)
        staging = flat if self._audit is None else self._audit.staging(flat)
        transfer = self._swap_in_of[handle] = self._start_in(buffer, handle, staging)
        if self._audit is not None:
            self._audit.in_queued(transfer, staging)
        self.recorder.sample_memory()
        return flat

    def in_done(self, token: torch.Tensor, flat: torch.Tensor) -> None:
        """Make compute wait for the bytes of ``token`` in ``flat``, which `in_start` returned.

        Raises:
            BytesChanged: these are not the bytes swapped out; detected in copies from disk or from compressed memory,
                and in all audited ones.
            TransferError: a copy failed.
        """
        handle = int(token)
        transfer = self._swap_in_of.pop(handle)
        try:
            self.native.in_done(handle, transfer, self._stream())
        except BytesDiffer as found:
            raise self._named(found) from None
        self._in_flight.pop(transfer, None)
        if self._audit is not None:
            self._audit.in_waited(handle, transfer, flat)

    def weight_in_start(self, weight: torch.Tensor, buffer: int, nbytes: int, offset: int) -> torch.Tensor:
        """Allocate device memory, queue the swap-in of the storage of ``weight``, and return the memory, as uint8.

        A weight that its owner has replaced is copied from where it is.

        Args:
            weight: lies in its host copy.
            buffer: the number in records.
            nbytes: of the storage, as traced.
            offset: of the weight in it, in bytes, as traced.
        """
        storage, begin = weight.untyped_storage(), weight.storage_offset() * weight.element_size() - offset
        handle = self.host_copies.find(storage)
        flat = self._allocate(nbytes, self.device)
        address = flat.data_ptr()
        self._weight_in_of.pop(address, None)  # of a step that raised
        if handle is None or begin != 0 or storage.nbytes() != nbytes:
            whole = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(storage)
            first, last = max(0, begin), min(storage.nbytes(), begin + nbytes)
            flat[first - begin : last - begin].copy_(whole[first:last])
            return flat
        self._weight_in_of[address] = handle, self._start_in(buffer, handle, flat)
        self.recorder.sample_memory()
        return flat

    def weight_in_done(self, flat: torch.Tensor) -> None:
        """Make compute wait for the bytes in ``flat``, which `weight_in_start` returned.

        Raises:
            TransferError: the copy failed.
        """
        started = self._weight_in_of.pop(flat.data_ptr(), None)
        if started is not None:
            self.native.in_done(*started, self._stream())
            self._in_flight.pop(started[1], None)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return device memory for what is copied in, at its planned offset if it has one."""
        if self.arena is not None:
            self.arena.open_next()
        if torch.are_deterministic_algorithms_enabled():  # torch.empty would fill it; this costs 5 µs more
            storage = torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
            return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _start_in(self, buffer: int, handle: int, target: torch.Tensor) -> int:
        """Queue the copy in to ``target``; return its number."""
        self._starting[id(target)] = target  # a signal handler may raise before the copy has a number
        transfer = self.native.in_start(buffer, handle, target.data_ptr(), target.nbytes, self._stream())
        self._in_flight[transfer] = target
        self._starting.pop(id(target), None)
        return transfer

    def check_async_errors(self) -> None:
        """Raise, at the end of a segment, errors of swap-ins that `in_done` could not see: it waits for no disk read.

        Raises:
            BytesChanged: as `in_done`.
        """
        try:
            self.native.confirm()
        except BytesDiffer as found:
            raise self._named(found) from None

    def _named(self, found: BytesDiffer) -> BytesChanged:
        where = "on the way out, in the tier or on the way in"
        return BytesChanged(*self._describe(found.swap), found.nbytes, where, found.offset_bytes)

    def begin_step(self) -> None:
        """Begin a step on the current stream."""
        if self.host_copies:
            self.recorder.note_tier_bytes(self.native.tier_stats(self._tier).used_bytes)
        if self.arena is not None:
            self.arena.begin_step()

    def release_cached(self) -> None:
        """Free memory between segments, before something else needs the device."""
        if self.arena is not None:
            self.arena.release_if_empty()

    def reap_finished_transfers(self) -> None:
        """Drop the tensors of copies that ended without a wait, as after an exception in mid-step.

        Errors of that step's copies are discarded.
        """
        self.native.forget_unconfirmed()
        if not (self._in_flight or self._starting or self._swap_in_of or self._weight_in_of or self._audit):
            return
        # Iterate over copies: another thread may begin or end transfers.
        for transfer in filter(self.native.is_finished, list(self._in_flight)):
            self._in_flight.pop(transfer, None)
        if self._starting and self.native.is_idle():
            self._starting.clear()
        for address, (_, transfer) in list(self._weight_in_of.items()):
            if self.native.is_finished(transfer):
                self._weight_in_of.pop(address, None)
        # Hooks may wait, after this, for a swap-in that ended before it.
        for handle in list(self._swap_in_of):
            if not self._is_live(handle):
                self._swap_in_of.pop(handle, None)
        if self._audit is not None and self.native.live_handles() == 0:
            self._audit.forget()

    def _is_live(self, handle: int) -> bool:
        try:
            return self.native.nbytes(handle) >= 0
        except OptionError:  # its token is dead
            return False

    def close_arena(self) -> None:
        """Stop using the arena: torch's allocator places tensors from here on."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def check_open(self) -> None:
        """Raise TransferError if it is closed, or belongs to the process that this one was forked from."""
        if self._is_closed or os.getpid() != self._process:
            ops.find_engine(self.number)

    def close(self) -> None:
        """Wait for copies under way, and free all memory and files. Idempotent."""
        self._is_closed = True
        ops.ENGINES.pop(self.number, None)
        self.native.close()
        self._in_flight.clear()
        self._starting.clear()
        self._swap_in_of.clear()
        self._weight_in_of.clear()
        self.host_copies.close()
        self.close_arena()
