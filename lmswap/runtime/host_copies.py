"""Host copies: the memory of storages while they are non-resident, where the caller reads and writes them in place.

A managed storage has exactly one location outside of a step: device memory, or its host copy. Its data pointer moves
between the two, so that the parameter and all of its aliases see the same bytes, and neither tensor nor storage object
changes. On a GPU a host copy is pinned memory that kernels address; on a CPU it is a mapping of an unnamed file.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from lmswap.errors import OptionError, TransferError
from lmswap.runtime import _C
from lmswap.runtime.step_record import MOVED, STREAMED
from lmswap.torch_compat.autograd import gradient_accumulator
from lmswap.torch_compat.operators import eager_dispatch
from lmswap.torch_compat.tensors import (
    free_weak_storage,
    from_dlpack,
    is_expired,
    live_storage,
    storage_id,
    storage_use_count,
    swap_data_pointers,
    tensor_use_count,
    weak_storage,
)

_CHUNK_BYTES = 2**30
# What accesses in place had mapped of files before these were trimmed, on two cores that both compute: norms 10 to
# 26 MiB in the median, 35 to 50 at most; saving and loading 6 to 12, and 20. To release so much, and to fill it again,
# takes 6 ms.
_MAX_MAPPED_BYTES = 64 * 2**20
_OWN_USE = 1  # of a storage's owners in C++: the Python object by which it is examined


class _HostCopy(NamedTuple):
    handle: int  # of the engine
    address: int
    storage: int  # weak reference to the storage, whose id no other storage gets meanwhile


def is_held_elsewhere(storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor], *, num_owners: int = 1) -> bool:
    """Return whether something beside ``tensors`` owns ``storage``, or one of them: it may have the address.

    A numpy array does, and what DLPack exports. Memory that processes or files share has its own place, too. Each
    tensor may have ``num_owners`` in C++: its Python object, and of a gradient also the parameter.
    """
    is_owned = storage_use_count(storage_id(storage)) > len(tensors) + _OWN_USE
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    return is_owned or is_shared or any(_has_other_owners(tensor, num_owners) for tensor in tensors)


def _has_other_owners(tensor: torch.Tensor, num_owners: int) -> bool:
    if tensor_use_count(tensor) <= num_owners:
        return False
    # Of a parameter, the node that accumulates its gradient is one while any graph refers to it.
    node = gradient_accumulator(tensor)
    return tensor_use_count(tensor) > num_owners + (node is not None)


class Fetched:
    """A storage that moves between device memory and its host copy, which is kept for it.

    ``memory`` is the one of both that the storage is not in: it is exchanged for the storage's own in one instruction,
    so that an interrupt finds each byte in one place.
    """

    def __init__(
        self, storage: torch.UntypedStorage, handle: int, memory: torch.UntypedStorage, host_address: int
    ) -> None:
        self.storage, self.handle, self.memory, self._host_address = storage, handle, memory, host_address
        self.transfer: int | None = None  # the latest copy; None if none is known to have started

    @property
    def is_resident(self) -> bool:
        """Whether the storage is in device memory now."""
        return self.storage.data_ptr() != self._host_address


class HostCopies:
    """The host copies of one engine, in one tier."""

    def __init__(self, native: _C.Engine, tier: str, device: torch.device, stream: Callable[[], int]) -> None:
        """``stream`` returns the current stream of ``device``."""
        self._native, self._tier, self.device, self._stream = native, tier, device, stream
        self._copies: dict[int, _HostCopy] = {}  # by `storage_id`

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that are in their host copies."""
        found = ((live_storage(copy.storage), copy.address) for copy in self._copies.values())
        return sum(
            storage.nbytes() for storage, address in found if storage is not None and storage.data_ptr() == address
        )

    @property
    def max_mapped_bytes(self) -> int:
        """What pages that the caller maps as it accesses storages in place take at most; on a GPU none."""
        return _MAX_MAPPED_BYTES if self.device.type == "cpu" else 0

    def mapped_bytes(self, of_bytes: int) -> int:
        """Return what pages that the caller maps as it accesses ``of_bytes`` in place take at most; on a GPU none."""
        return min(of_bytes, self.max_mapped_bytes)

    def find(self, storage: torch.UntypedStorage) -> int | None:
        """Return the handle of the host copy in which ``storage`` is; None if it is elsewhere."""
        found = self._copies.get(storage_id(storage))
        return found.handle if found is not None and found.address == storage.data_ptr() else None

    def move_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Move storages from the device to host copies; their device memory is free once the queued copies have ended.

        Raises:
            TierError: the tier has no room; storages that were not moved yet stay where they are.
            TransferError: a copy failed; so do they.
        """
        for number, copy in [*self._copies.items()]:
            if is_expired(copy.storage):
                del self._copies[number]
                free_weak_storage(copy.storage)
        for chunk in _chunks(storages):
            blocks = self._make(chunk)
            for storage in chunk:
                handle, block = blocks.pop(0)
                transfer = self._native.fill_host_copy(MOVED, handle, storage.data_ptr(), self._stream())
                self._native.in_done(handle, transfer, self._stream())
                self._register(storage, handle, block.data_ptr())
                swap_data_pointers(storage, block.untyped_storage())

    def receive(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a new storage of the device, in a host copy, with the bytes of ``storage``, which lies on the CPU.

        Raises:
            TierError: the tier has no room.
        """
        ((handle, block),) = self._make([storage])
        ctypes.memmove(block.data_ptr(), storage.data_ptr(), storage.nbytes())
        self._register(block.untyped_storage(), handle, block.data_ptr())
        return block.untyped_storage()

    def move_in(self, storage: torch.UntypedStorage) -> None:
        """Move a storage from its host copy to device memory; without effect if it is not in one.

        Raises:
            TransferError: the copy failed; the storage stays where it is.
        """
        handle = self.find(storage)
        if handle is None:
            return
        with eager_dispatch():  # also in the middle of a trace
            flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
        transfer = self._native.in_start(MOVED, handle, flat.data_ptr(), flat.nbytes, self._stream())
        self._native.in_done(handle, transfer, self._stream())
        self._native.confirm()
        swap_data_pointers(storage, flat.untyped_storage())
        self._forget(storage)

    def prepare_fetch(self, storage: torch.UntypedStorage) -> Fetched | None:
        """Take device memory for a storage, to be kept until it is back; None if it is not in a host copy."""
        handle = self.find(storage)
        if handle is None:
            return None
        memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage()
        return Fetched(storage, handle, memory, storage.data_ptr())

    def prepare_move_out(self, storage: torch.UntypedStorage, spare: torch.UntypedStorage | None = None) -> Fetched:
        """Take a host copy for a storage in device memory, where it is after `finish_move`.

        That of ``spare`` is taken over if it suits and nothing else owns ``spare``, which gets the device memory then.

        Raises:
            TierError: the tier has no room.
        """
        handle = None
        if (
            spare is not None
            and spare.nbytes() == storage.nbytes()
            and storage_use_count(storage_id(spare)) == _OWN_USE
        ):
            handle = self.find(spare)
        if spare is None or handle is None:
            ((handle, block),) = self._make([storage])
            spare = block.untyped_storage()
        self._forget(spare)
        address = spare.data_ptr()
        self._register(storage, handle, address)  # which it is in as soon as it is there
        return Fetched(storage, handle, spare, address)

    def drop_fetched(self, fetched: Fetched) -> None:
        """Return a fetched storage that was only read to its host copy, without a copy; its device memory is free."""
        swap_data_pointers(fetched.storage, fetched.memory)

    def start_move(self, fetched: Fetched) -> None:
        """Start to copy a storage to the one of its two places that it is not in, where it is after `finish_move`."""
        memory, stream = fetched.memory, self._stream()
        if fetched.is_resident:
            address = fetched.storage.data_ptr()
            fetched.transfer = self._native.fill_host_copy(STREAMED, fetched.handle, address, stream)
        else:
            given = memory.data_ptr(), memory.nbytes()
            fetched.transfer = self._native.in_start(STREAMED, fetched.handle, *given, stream)

    def finish_move(self, fetched: Fetched) -> None:
        """Make the current stream wait for the copy; the storage is in the other place from here on.

        Raises:
            TransferError: the copy failed; the storage stays where it is, a resident one for good.
        """
        self.finish_read(fetched)
        swap_data_pointers(fetched.storage, fetched.memory)

    def finish_read(self, fetched: Fetched) -> None:
        """Make the current stream wait for the copy, which is read in ``memory``: the storage stays where it is.

        Raises:
            TransferError: the copy failed.
        """
        assert fetched.transfer is not None
        self._native.in_done(fetched.handle, fetched.transfer, self._stream())

    def cancel_read(self, fetched: Fetched) -> None:
        """Wait for the copy, as its memory dies; its errors are of no interest."""
        with suppress(OptionError):  # its host copy has been freed
            self._await_abandoned(fetched)

    def settle(self, fetched: Fetched, *, on_device: bool = False) -> None:
        """Move a storage to its host copy, or to device memory, whatever was done last; waits for copies under way.

        Raises:
            TransferError: the copy failed; the storage stays in the other place.
        """
        if fetched.is_resident is on_device:
            self._await_abandoned(fetched)  # this place has all of it
            return
        self.start_move(fetched)
        self.finish_move(fetched)

    def _await_abandoned(self, fetched: Fetched) -> None:
        """Wait for the latest copy, of whose result nothing is needed."""
        while fetched.transfer is None and not self._native.is_idle():  # interrupted while it started
            time.sleep(0.001)
        if fetched.transfer is not None:
            with suppress(TransferError):
                self.finish_read(fetched)

    def take_spare(self, fetched: Fetched) -> torch.UntypedStorage:
        """Return the host copy of a storage that is back in device memory, for `prepare_move_out`."""
        self._register(fetched.memory, fetched.handle, fetched.memory.data_ptr())
        self._forget(fetched.storage)
        return fetched.memory

    @staticmethod
    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the CPU with the bytes of one in a host copy: only while that stays there."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor.cpu()
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())

    def synchronize(self) -> None:
        """Wait for all that is queued on the current stream: the CPU may access host copies then."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @staticmethod
    def move_to_heap(storage: torch.UntypedStorage) -> None:
        """Move a storage on the CPU to memory that torch allocates now."""
        moved = torch.UntypedStorage(storage.nbytes(), device="cpu")  # type: ignore[no-untyped-call]
        moved.copy_(storage)
        swap_data_pointers(storage, moved)

    def close(self) -> None:
        """Forget all; storages keep the memory of their host copies. Idempotent."""
        while self._copies:
            _, copy = self._copies.popitem()
            free_weak_storage(copy.storage)

    def _make(self, storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, torch.Tensor]]:
        """Make blocks for the bytes of ``storages``; each is freed with its tensor, or what takes that one's memory."""
        made = self._native.make_host_copies(self._tier, [storage.nbytes() for storage in storages])
        with eager_dispatch():
            return [(handle, from_dlpack(capsule)) for handle, capsule in made]

    def _register(self, storage: torch.UntypedStorage, handle: int, address: int) -> None:
        self._forget(storage)
        self._copies[storage_id(storage)] = _HostCopy(handle, address, weak_storage(storage))

    def _forget(self, storage: torch.UntypedStorage) -> None:
        if (copy := self._copies.pop(storage_id(storage), None)) is not None:
            free_weak_storage(copy.storage)


def _chunks(storages: Sequence[torch.UntypedStorage]) -> Iterator[list[torch.UntypedStorage]]:
    """Yield ``storages`` in groups of up to a GiB: host memory is taken as device memory is given back."""
    chunk: list[torch.UntypedStorage] = []
    for storage in storages:
        if chunk and sum(each.nbytes() for each in chunk) + storage.nbytes() > _CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(storage)
    if chunk:
        yield chunk
