"""Outputs of a step that the caller holds until the forward of the next one has returned its own.

That is what a loop does which binds them to the same name each time: they are held at the step's start, and not in its
backward. An arena has room of its own for them, see `lmswap.session.retention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage

from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.pytree import tensors
from lmswap.torch_compat.tensors import free_weak_storage, is_expired, storage_id, weak_storage

# Tensors of fewer values are not tracked: margins are larger.
_MIN_VALUES = 2**18


class _Tracked(NamedTuple):
    storage: int  # weak reference to the storage, whose id no other storage gets meanwhile
    nbytes: int


class EarlierOutputs:
    """Tracks the outputs of a model's last two steps, by weak references."""

    def __init__(self) -> None:
        self._earlier: dict[int, _Tracked] = {}  # by the id of their storage: of the step before the one under way
        self._latest: dict[int, _Tracked] = {}
        self._is_over = False  # whether the backward of the latest has begun, if there are any
        self._are_kept = False  # whether the last backward began with outputs of the step before it
        self.begun_bytes = 0  # held when the step under way began, and by its backward no more

    def begin_call(self) -> None:
        """Note that the model is called with gradients: after a backward, that begins a step."""
        if self._is_over:
            _free(self._earlier)
            self._earlier, self._latest, self._is_over = self._latest, {}, False
            self.begun_bytes = self.held_bytes

    def end_call(self, result: Any) -> None:
        """Track the tensors in the ``result`` of the call."""
        for output in (result,) if isinstance(result, Tensor) else tensors(result):
            if output.numel() >= _MIN_VALUES and has_plain_storage(output):
                self._track(output.untyped_storage())

    def _track(self, storage: UntypedStorage) -> None:
        if storage_id(storage) not in self._latest:
            self._latest[storage_id(storage)] = _Tracked(weak_storage(storage), storage.nbytes())

    def begin_backward(self) -> None:
        """Note whether outputs of the step before are still held: then the caller keeps them for longer."""
        if (self._latest or self._earlier) and not self._is_over:
            self._is_over, self._are_kept = True, _held_bytes(self._earlier) > 0

    @property
    def held_bytes(self) -> int:
        """The bytes held now of the step before the one under way; 0 if the caller keeps them for longer."""
        return 0 if self._are_kept else _held_bytes(self._earlier)

    def __del__(self) -> None:
        _free(self._earlier)
        _free(self._latest)


def _held_bytes(tracked: Mapping[int, _Tracked]) -> int:
    return sum(each.nbytes for each in tracked.values() if not is_expired(each.storage))


def _free(tracked: Mapping[int, _Tracked]) -> None:
    for each in tracked.values():
        free_weak_storage(each.storage)
