"""What does autograd hold instead of a saved tensor? A view's description, and the storage that it shares with others.

The bytes in the tier are owned by the storage, which only saved tensors own: a graph that is dropped, or whose backward
raised, gives everything back by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lmswap.eager.check import Kept
from lmswap.errors import SavedTensorChanged
from lmswap.execute import ops


class SavedStorage:
    """A storage that waits for the backward pass: on the device, leaving, away, arriving, or back.

    ``number`` counts the storages of a step in the order in which they were first saved, ``version`` is the tensor's
    at that time.
    """

    __slots__ = ("__weakref__", "_engine", "_flat", "_origin", "_tensor", "_token", "nbytes", "number", "version")

    def __init__(self, engine: int, number: int, tensor: torch.Tensor) -> None:
        """``tensor`` has no grad_fn."""
        self.number, self.version = number, tensor._version
        self._engine = engine
        self._tensor: torch.Tensor | None = tensor  # shares the storage; None while it is away
        self._token: torch.Tensor | None = None  # owns the tier's bytes, from the copy out on
        self._flat: torch.Tensor | None = None  # on its way in
        storage = tensor.untyped_storage()
        self.nbytes = int(storage.nbytes())
        # Keeps the storage's address from being used again, but not its bytes.
        self._origin: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_on_device(self) -> bool:
        """Whether its bytes occupy the device, for autograd or for whoever else holds the storage."""
        return self._tensor is not None or self._flat is not None or not self._origin.expired()

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether it stays on the device although it was let go of here."""
        return self._tensor is None and not self._origin.expired()

    def leave(self, tier: str, offset: int) -> None:
        """Queues the copy out, once; it stays on the device until `release`."""
        if self._token is None and self._tensor is not None:
            self._token = ops.find_engine(self._engine).out_start(self._tensor, self.number, tier, offset, False)

    def release(self) -> None:
        """Lets go of the device memory if a copy is, or is about to be, away; compute waits for that copy."""
        if self._token is not None and self._tensor is not None:
            ops.find_engine(self._engine).wait_out(self._token)
            self._tensor = None

    def come_back(self) -> None:
        """Queues the copy in, unless the bytes are there."""
        if self._tensor is None and self._flat is None and self._token is not None:
            self._flat = ops.find_engine(self._engine).in_start(self._token, self.number, self._device)

    def fetch(self) -> torch.Tensor:
        """A tensor that shares the storage, once its bytes are there."""
        if self._tensor is None:
            self._tensor = self._still_held()
        if self._tensor is None:
            self._tensor = self._arrived()
        return self._tensor

    def _arrived(self) -> torch.Tensor:
        self.come_back()
        assert self._flat is not None and self._token is not None
        flat, self._flat = self._flat, None
        ops.find_engine(self._engine).in_done(self._token, flat)
        return flat

    def _still_held(self) -> torch.Tensor | None:
        """The original, if it lives on for others."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._origin.cdata)
        if storage is None or self._flat is not None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    @property
    def _device(self) -> torch.device:
        return ops.find_engine(self._engine).device


class SavedTensor:
    """What a pack hook returns: how to see a storage, and at which version of the tensor it was saved.

    With no storage it holds the tensor itself.
    """

    __slots__ = ("_dtype", "_offset", "_shape", "_stride", "_version", "_watched", "kept", "storage")

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage | None) -> None:
        """``tensor`` has no grad_fn."""
        self.storage, self._version = storage, tensor._version
        self.kept: Kept | None = None  # in verification
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
        shape = self._watched.shape if self.storage is None else self._shape
        node: Any = torch._C._current_autograd_node()
        name = node.name() if node else "autograd"
        raise SavedTensorChanged(
            f"{name} needs a {self._watched.dtype} tensor of shape {list(shape)} as it was saved, at version "
            f"{self._version}, but it was changed in place since and is at version {self._watched._version}; "
            "torch.autograd.set_detect_anomaly(True) shows which operation saved it"
        )

    def restore(self) -> torch.Tensor:
        """The tensor, bit for bit."""
        if self.storage is None:
            return self._watched
        whole = self.storage.fetch()
        view = torch.empty(0, dtype=self._dtype, device=whole.device)
        return view.set_(whole.untyped_storage(), self._offset, self._shape, self._stride)
