"""The storage of saved tensors, which can be swapped out, and the view of it that autograd holds instead of the tensor.

Without hooks autograd keeps the tensor itself, so its backward reads what the storage holds at that time, including
writes after the save: by the operator that saved it before filling it (rrelu), by one that writes further parts of it
(the cells of GRU and LSTM), through ``.data``, ``detach()``, ``no_grad``, or by a C++ extension. Version counters
detect only some of these writes. Hence one rule:

    A storage may be swapped out only while its saved tensors are its only owners, and its copy in the tier is valid
    only until its bytes are passed to code that may write them.

Code that can write holds a reference, and torch counts references. What others hold stays resident, as it would without
lmswap. Memory not allocated by torch for this process (of numpy, a file, another process) can be written without a
reference, and is never swapped: see `is_torch_allocated`.

A storage is copied on the stream of the node that saved it, forward and backward: its writes and reads are in order
there, whichever stream is current. What is saved or unpacked on a second stream stays resident from then on. Its memory
is released earlier than by autograd, and reused once all streams that its step saves on have reached that point: while
autograd holds a tensor, no reader on another stream needs to be recorded.

The storage owns the bytes in the tier, and only saved tensors own the storage: a graph that is dropped, or whose
backward raises, frees everything.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch

from lmswap.errors import SavedTensorChanged
from lmswap.runtime import ops
from lmswap.torch_compat.autograd import current_node
from lmswap.torch_compat.tensors import storage_id, storage_use_count


class SavedStorage:
    """The storage of saved tensors: resident, being swapped out, non-resident, or being swapped in.

    ``number`` counts the storages of a step in the order of their first save; ``nbytes`` is the size at that time.
    """

    __slots__ = (
        "__weakref__",
        "_destination",
        "_engine",
        "_flat",
        "_is_multistream",
        "_is_original",
        "_saving_streams",
        "_storage",
        "_stream",
        "_tensor",
        "_token",
        "nbytes",
        "number",
        "original",
    )

    def __init__(
        self,
        engine: int,
        number: int,
        tensor: torch.Tensor,
        stream: int = 0,
        saving_streams: Collection[int] = (),
        *,
        keeps_original: bool = False,
    ) -> None:
        """``tensor`` has no grad_fn, and that object has no other owner; ``stream`` is the one on which it is saved.

        ``saving_streams`` are those on which its step saves, more as it goes on; ``keeps_original``: for verification.
        """
        self.number = number
        self._engine, self._stream, self._saving_streams = engine, stream, saving_streams
        self._is_multistream = False  # used on several streams
        self._tensor: torch.Tensor | None = tensor  # None while non-resident
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()  # that of _tensor
        self.nbytes = int(self._storage.nbytes())
        self._destination: tuple[str, int] | None = None  # tier and offset of the last swap-out
        self._token: torch.Tensor | None = None  # owns the copy in the tier, while that is valid
        self._flat: torch.Tensor | None = None  # target of the swap-in under way
        self.original = tensor.detach() if keeps_original else None
        self._is_original = True  # until the first swap-in

    @property
    def is_on_device(self) -> bool:
        """Whether its bytes occupy device memory."""
        return self._tensor is not None or self._flat is not None

    @property
    def verification_bytes(self) -> int:
        """Device memory of the original that would be free if it were not kept, in bytes."""
        is_released = self.original is not None and (self._tensor is None or not self._is_original)
        return self.nbytes if is_released else 0

    def occupies(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` now holds its bytes."""
        return self._storage is not None and storage_id(self._storage) == storage_id(storage)

    def swap_out(self, tier: str, offset: int) -> bool:
        """Queue the swap-out if that is allowed; the device memory is held until `release`.

        Returns:
            Whether the tier has, or will have, a valid copy.
        """
        if self._token is None and self._tensor is not None and self.can_swap_out():
            self._destination = (tier, offset)
            engine = ops.find_engine(self._engine)
            with engine.streams.at(self._stream):  # on which they were written, or waited for
                self._token = engine.out_start(self._tensor, self.number, tier, offset, False)
        return self._token is not None

    def swap_out_if_unshared(self, tier: str, offset: int) -> bool:
        """As `swap_out`, but a copy is not valid while others own the storage: they may write it."""
        if self._tensor is None or self.can_swap_out():
            return self.swap_out(tier, offset)
        self._token = None
        return False

    def release(self) -> bool:
        """Free the device memory if the tier has a valid copy, or can get one at the offset of the last swap-out.

        The compute stream waits for the copy.

        Returns:
            Whether the storage is non-resident.
        """
        if self._tensor is not None and self._destination is not None:
            if self._token is not None and not self._is_sole_owner():
                self._token = None
            if self.swap_out(*self._destination):
                assert self._token is not None
                engine = ops.find_engine(self._engine)
                with engine.streams.at(self._stream):
                    engine.wait_out(self._token)
                engine.streams.delay_reuse(self._tensor, self._saving_streams)
                self._tensor = self._storage = None
        return not self.is_on_device

    def swap_in(self) -> None:
        """Queue the swap-in, unless the storage is resident."""
        if not self.is_on_device and self._token is not None:
            engine = ops.find_engine(self._engine)
            with engine.streams.at(self._stream):  # to which the memory then belongs
                self._flat = engine.in_start(self._token, self.number, engine.device)

    def fetch(self) -> torch.Tensor:
        """Return a tensor that shares the storage, after a swap-in if needed."""
        if self._tensor is None:
            self.swap_in()
            self.await_swap_in()
        assert self._tensor is not None
        return self._tensor

    def await_swap_in(self) -> None:
        """Make compute wait for the swap-in under way, if there is one."""
        if self._flat is None:
            return
        assert self._token is not None
        flat, self._flat = self._flat, None
        engine = ops.find_engine(self._engine)
        with engine.streams.at(self._stream):
            engine.in_done(self._token, flat)
        self._tensor, self._storage, self._is_original = flat, flat.untyped_storage(), False

    def note_use_on(self, stream: int) -> None:
        """Note that a node is about to use the resident bytes on ``stream``, the current one."""
        if stream == self._stream:
            return
        self._is_multistream, self._token = True, None
        if not self._is_original:  # else they were resident before the node was created
            ops.find_engine(self._engine).streams.wait_for(self._stream)

    def invalidate_copy(self) -> None:
        """Invalidate the copy in the tier: code that may write gets the bytes."""
        self._token = None

    def can_swap_out(self) -> bool:
        """Return whether saved tensors are its only owners and one stream uses it."""
        # Of a resized storage, the planned extent in the tier would hold a part only.
        is_whole = self._storage is not None and self._storage.nbytes() == self.nbytes
        return is_whole and not self._is_multistream and self._is_sole_owner()

    def _is_sole_owner(self) -> bool:
        uses, references = _SOLE_OWNER_COUNTS
        return self._owners() == (uses + (self._is_original and self.original is not None), references)

    def _owners(self) -> tuple[int, int]:
        """Return the storage's use count in C++, and its reference count in Python."""
        storage: Any = self._storage
        uses = storage_use_count(storage_id(storage))
        return uses, sys.getrefcount(storage)


# Counts of a storage without other owners, measured: torch versions count Python's references differently.
_SOLE_OWNER_COUNTS = SavedStorage(0, 0, torch.empty(1))._owners()


def is_torch_allocated(storage: torch.UntypedStorage) -> bool:
    """Return whether torch's allocator made it for this process, so that any writer holds a reference to it."""
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    return storage.resizable() and not is_shared


class SavedTensor:
    """What the pack hook returns for a tensor that is not swapped: the tensor, and its version at the save."""

    __slots__ = ("_version", "_watched")

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor`` has no grad_fn."""
        self._watched, self._version = tensor, tensor._version

    def check(self) -> None:
        """Raise SavedTensorChanged if the tensor was changed in place since: torch checks only where no hooks are."""
        if self._watched._version == self._version:
            return
        raise SavedTensorChanged(
            f"{self._describe()} as it was saved, at version {self._version}, but it was changed in place since and is "
            f"at version {self._watched._version}; torch.autograd.set_detect_anomaly(True) shows which operation saved "
            "it"
        )

    def restore(self) -> torch.Tensor:
        """Return the tensor, bitwise identical; it shares the version counter of the tensor saved.

        Raises:
            SavedTensorChanged: it was changed in place since, or its storage has been shrunk.
        """
        self.check()
        return self._watched

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape at the save."""
        return tuple(self._watched.shape)

    def _describe(self) -> str:
        node = current_node()
        name = node.name() if node else "autograd"
        return f"{name} needs a {self._watched.dtype} tensor of shape {list(self.shape)}"


class SwappableTensor(SavedTensor):
    """What the pack hook returns for a tensor that may be swapped: a view of its storage."""

    __slots__ = ("_dtype", "_offset", "_shape", "_stride", "made_by", "storage")

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage) -> None:
        """``tensor`` has no grad_fn."""
        self.storage, self._version = storage, tensor._version
        self.made_by: str | None = None  # in verification: the module and the user's line
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._watched = tensor.detach()  # shares the tensor's version counter, without its bytes
        self._watched.data = tensor.new_empty(0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape at the save."""
        return tuple(self._shape)

    def restore(self) -> torch.Tensor:
        """As `SavedTensor.restore`, after a swap-in if needed; the caller has called `check`."""
        tensor = self._watched.detach()
        tensor.data = self.view_of(self.storage.fetch())
        return tensor

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the tensor's view of the storage that ``whole`` shares.

        Raises:
            SavedTensorChanged: the storage is too small for it.
        """
        storage = whole.untyped_storage()
        last = sum((size - 1) * stride for size, stride in zip(self._shape, self._stride, strict=True))
        if 0 not in self._shape and (self._offset + last + 1) * self._dtype.itemsize > storage.nbytes():
            raise SavedTensorChanged(
                f"{self._describe()} as it was saved, but its storage was resized to {storage.nbytes()} bytes since"
            )
        view = torch.empty(0, dtype=self._dtype, device=whole.device)
        return view.set_(storage, self._offset, self._shape, self._stride)
