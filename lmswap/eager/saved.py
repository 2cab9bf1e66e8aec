"""What does autograd hold instead of a saved tensor, and when may its bytes leave? A view's description, and a storage.

Without hooks autograd keeps the tensor itself, so its backward reads what the storage holds *then*, whoever wrote it
after it was saved: the operator that saved it before filling it (rrelu), one that goes on to write other pieces of it
(the cells of GRU and LSTM), ``.data``, ``detach()``, ``no_grad``, an extension in C++. Version counters tell of some of
these writes only. Hence one rule:

    A storage leaves only while nobody but its saved tensors holds it, and its copy in the tier counts only until
    somebody who may write is given the bytes.

Who can write holds a reference, and torch counts those. What others hold stays on the device, where it would have
stayed anyway. Memory that torch does not own alone (numpy's, a file's, another process's) may be written without a
reference, and never leaves: see `is_torchs_own`.

A storage is moved on the stream that the node which saved it computes on, forward and backward: what writes and reads
it is in order there, whichever stream is current when its turn comes. What is saved on a second stream, or taken back
on one, stays on the device from then on. Its memory is given up earlier than autograd would, and is used again when all
streams that the model saves on have come as far: with autograd's hold on it nobody had to say who else reads it.

The bytes in the tier are owned by the storage, which only saved tensors own: a graph that is dropped, or whose backward
raised, gives everything back by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lmswap.eager.check import SavedBy, SavedCheck
from lmswap.errors import SavedTensorChanged
from lmswap.execute import ops


class SavedStorage:
    """A storage that waits for the backward pass: on the device, leaving, away, arriving, or back.

    ``number`` counts the storages of a step in the order in which they were first saved; ``nbytes`` is its size then.
    """

    __slots__ = (
        "__weakref__",
        "_check",
        "_engine",
        "_flat",
        "_is_original",
        "_place",
        "_stays",
        "_storage",
        "_stream",
        "_tensor",
        "_token",
        "nbytes",
        "number",
        "original",
    )

    def __init__(
        self, engine: int, number: int, tensor: torch.Tensor, stream: int = 0, check: SavedCheck | None = None
    ) -> None:
        """``tensor`` has no grad_fn, and nobody else keeps that object; with ``check``, the original is kept too.

        ``stream`` is the one that it is saved on.
        """
        self.number = number
        self._engine, self._stream, self._check = engine, stream, check
        self._stays = False  # several streams use it
        self._tensor: torch.Tensor | None = tensor  # None while it is away
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()  # that of _tensor
        self.nbytes = int(self._storage.nbytes())
        self._place: tuple[str, int] | None = None  # tier and offset that it last left to
        self._token: torch.Tensor | None = None  # owns the tier's bytes, while these count
        self._flat: torch.Tensor | None = None  # on its way in
        self.original = tensor.detach() if check else None
        self._is_original = True  # while it has not been away

    @property
    def is_on_device(self) -> bool:
        """Whether its bytes occupy the device."""
        return self._tensor is not None or self._flat is not None

    def lies_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether its bytes are there now."""
        return self._storage is not None and self._storage._cdata == storage._cdata

    def leave(self, tier: str, offset: int) -> bool:
        """Queues the copy out, if it may leave; it stays on the device until `release`. Whether a copy counts now."""
        if self._token is None and self._tensor is not None and self.may_leave():
            self._place = (tier, offset)
            engine = ops.find_engine(self._engine)
            with engine.streams.at(self._stream):  # on which they were written, or waited for
                self._token = engine.out_start(self._tensor, self.number, tier, offset, False)
        return self._token is not None

    def release(self) -> bool:
        """Lets go of the device memory if it has left, or can leave to where it was; whether it is away.

        Compute waits for the copy.
        """
        if self._tensor is not None and self._place is not None:
            if self._token is not None and not self._is_alone():
                self._token = None
            if self.leave(*self._place):
                assert self._token is not None
                engine = ops.find_engine(self._engine)
                with engine.streams.at(self._stream):
                    engine.wait_out(self._token)
                engine.streams.keep_from_reuse(self._tensor, self._stream)
                self._tensor = self._storage = None
                if self._check is not None:
                    self._check.has_left(self)
        return not self.is_on_device

    def come_back(self) -> None:
        """Queues the copy in, unless the bytes are there."""
        if not self.is_on_device and self._token is not None:
            engine = ops.find_engine(self._engine)
            with engine.streams.at(self._stream):  # to which the memory then belongs
                self._flat = engine.in_start(self._token, self.number, engine.device)

    def fetch(self) -> torch.Tensor:
        """A tensor that shares the storage, once its bytes are there."""
        if self._tensor is None:
            self.come_back()
            assert self._flat is not None and self._token is not None
            flat, self._flat = self._flat, None
            engine = ops.find_engine(self._engine)
            with engine.streams.at(self._stream):
                engine.in_done(self._token, flat)
            self._tensor, self._storage, self._is_original = flat, flat.untyped_storage(), False
        return self._tensor

    def is_used_on(self, stream: int) -> None:
        """A node is about to use the bytes, which are there, on ``stream``, the current one."""
        if stream == self._stream:
            return
        self._stays, self._token = True, None
        if not self._is_original:  # else they are there since before the node was made
            ops.find_engine(self._engine).streams.wait_for(self._stream)

    def is_given_to_others(self) -> None:
        """Somebody who may write has the bytes: what is in the tier counts no more."""
        self._token = None

    def may_leave(self) -> bool:
        """Whether nobody else holds it, on one stream."""
        # Of a storage that was resized, a plan's place in the tier would hold a part.
        is_whole = self._storage is not None and self._storage.nbytes() == self.nbytes
        return is_whole and not self._stays and self._is_alone()

    def _is_alone(self) -> bool:
        uses, references = _ALONE
        return self._owners() == (uses + (self._is_original and self.original is not None), references)

    def _owners(self) -> tuple[int, int]:
        """How many tensors and the like use the storage, and how many names it has in Python."""
        storage: Any = self._storage
        uses = torch._C._storage_Use_Count(storage._cdata)
        return uses, sys.getrefcount(storage)


# As counted of a storage that has no other owner: torch's versions count what Python holds differently.
_ALONE = SavedStorage(0, 0, torch.empty(1))._owners()


def is_torchs_own(storage: torch.UntypedStorage) -> bool:
    """Whether torch's allocator made it for this process, so that who writes it holds a reference to it."""
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    return storage.resizable() and not is_shared


class SavedTensor:
    """What a pack hook returns: how to see a storage, and at which version of the tensor it was saved.

    With no storage it holds the tensor itself.
    """

    __slots__ = ("_dtype", "_offset", "_shape", "_stride", "_version", "_watched", "by", "storage")

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage | None) -> None:
        """``tensor`` has no grad_fn."""
        self.storage, self._version = storage, tensor._version
        self.by: SavedBy | None = None  # in verification
        self._watched = tensor
        if storage is None:
            return
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._watched = tensor.detach()  # counts versions with the tensor, even without its bytes
        self._watched.data = tensor.new_empty(0)

    def check(self) -> None:
        """Raises SavedTensorChanged if the tensor was changed in place since: torch looks only where no hooks are."""
        if self._watched._version == self._version:
            return
        raise SavedTensorChanged(
            f"{self._describe()} as it was saved, at version {self._version}, but it was changed in place since and is "
            f"at version {self._watched._version}; torch.autograd.set_detect_anomaly(True) shows which operation saved "
            "it"
        )

    def restore(self) -> torch.Tensor:
        """The tensor, bit for bit; who writes it is noticed by `check`, as if it were the one that was saved.

        Raises:
            SavedTensorChanged: its storage was made smaller since.
        """
        if self.storage is None:
            return self._watched
        tensor = self._watched.detach()
        tensor.data = self.view_of(self.storage.fetch())
        return tensor

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """What the tensor sees of a storage, which ``whole`` shares.

        Raises:
            SavedTensorChanged: the storage ends before.
        """
        storage = whole.untyped_storage()
        last = sum((size - 1) * stride for size, stride in zip(self._shape, self._stride, strict=True))
        if 0 not in self._shape and (self._offset + last + 1) * self._dtype.itemsize > storage.nbytes():
            raise SavedTensorChanged(
                f"{self._describe()} as it was saved, but its storage was resized to {storage.nbytes()} bytes since"
            )
        view = torch.empty(0, dtype=self._dtype, device=whole.device)
        return view.set_(storage, self._offset, self._shape, self._stride)

    def _describe(self) -> str:
        shape = self._watched.shape if self.storage is None else self._shape
        node: Any = torch._C._current_autograd_node()
        name = node.name() if node else "autograd"
        return f"{name} needs a {self._watched.dtype} tensor of shape {list(shape)}"
