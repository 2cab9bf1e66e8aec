"""What happens when autograd saves a tensor, and when it needs it again? One forward, and the backwards through it.

A step follows a plan for as long as its events are those that were planned for. From the first other event on it is
served without one, correct and slowly: whatever is saved leaves at once, what is needed is fetched when it is needed;
and it is recorded, so that the next step like it can be planned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from lmswap.eager.actions import Actions, PlannedEvents
from lmswap.eager.check import SavedCheck
from lmswap.eager.recording import Recorded, Recording
from lmswap.eager.saved import SavedStorage, SavedTensor
from lmswap.hardware.memory import DeviceMemory


class Host(Protocol):
    """What a step needs to know of the model that it belongs to."""

    engine_number: int
    device: torch.device
    tier: str
    min_swap_bytes: int
    memory: DeviceMemory
    module_names: Mapping[int, str]  # by identity
    check: SavedCheck | None  # what verifies saved tensors

    def known_steps(self) -> Sequence[PlannedEvents]:
        """Steps that there are plans for, the best guess first."""

    def backward_begins(self, step: EagerStep) -> None:
        """A backward pass has reached the model."""

    def begin_op(self) -> None:
        """The next op of a planned step begins, but for the first of each pass."""

    def backward_ends(self, step: EagerStep) -> None:
        """That pass is over; not called if it raised."""


class EagerStep:
    """Serves saved-tensor hooks. Saved tensors own the step, and it owns none of them."""

    def __init__(
        self,
        host: Host,
        planned: PlannedEvents | None,
        resident: Callable[[], frozenset[int]],
        *,
        kind: Hashable = None,
        records: bool = True,
    ) -> None:
        """``resident`` gives the identities of storages that live on whatever autograd does."""
        self._host, self._find_resident = host, resident
        self._resident: frozenset[int] | None = None  # asked for when a large tensor is saved
        self.kind, self.planned = kind, planned
        self.recording: Recording | None = None  # of a step without a plan, unless it cannot be planned for
        self._base_bytes = host.memory.used_tensor_bytes() if records else 0
        self._by_storage: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self.num_storages = 0  # that were saved and can leave
        self._saves: list[tuple[int, int]] = []
        self._needs: list[int] | None = None  # None while the forward runs
        self._task = -1  # autograd's number of the backward pass
        self._node: tuple[int, int] | None = None  # that pass, and the number of its node that runs
        self._in_use: list[weakref.ref[SavedStorage]] = []  # what that node took back, and no other will need
        if planned is None and records:
            self.recording = Recording(host.memory, self._base_bytes, Recorded())
            self.recording.begin("forward", ())

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Autograd saves ``tensor``."""
        tensor = tensor.detach()  # its grad_fn would own what it has saved: a cycle that nobody could collect
        if not self._can_leave(tensor):
            return SavedTensor(tensor, None)
        storage = self._storage_of(tensor)
        saved = SavedTensor(tensor, storage)
        self._saves.append((storage.number, storage.nbytes))
        at = len(self._saves) - 1
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and self.planned.saves[at : at + 1] != (self._saves[at],):
            self._leave_plan()
        if self._host.check is not None:
            saved.kept = self._host.check.keep(tensor, self._host.module_names)
        if self.planned is not None:
            self._act(self.planned.after_pack(at))
            self._host.begin_op()
            return saved
        _send_away(storage, self._host.tier)
        if self.recording is not None:
            self.recording.pack(storage.number, storage.nbytes, tensor, self._host.module_names)
            self.recording.begin("forward", self._present())
        return saved

    def end_forward(self) -> None:
        """The model returns."""
        if self._needs is None:
            self._needs = []
        if self.planned is not None and len(self._saves) != len(self.planned.saves):
            self._leave_plan()
        if self.planned is not None:
            self._act(self.planned.after_forward())
        elif self.recording is not None:
            self.recording.end()
            self.recording.begin("loss", self._present())

    @property
    def holds_storages(self) -> bool:
        """Whether anything that it saved and that can leave is needed still."""
        return len(self._by_number) > 0

    def make_way(self) -> None:
        """Another forward begins before the backward of this one: no plan was made for what both hold together."""
        if self.planned is not None:
            self.planned = None
            for storage in list(self._by_number.values()):
                _send_away(storage, self._host.tier)

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Autograd needs what it saved."""
        saved.check()
        storage = saved.storage
        node: Any = torch._C._current_autograd_node()
        if storage is None:
            return saved.restore()
        if node is None:  # somebody looks at what a grad_fn has saved
            tensor = self._restored(saved, "a look at grad_fn")
            storage.release()
            return tensor
        running = (torch._C._current_graph_task_id(), node._sequence_nr())
        if running != self._node:
            self._begin_node(running, node.name(), storage)
        elif self.recording is not None:
            self.recording.take_more(storage.number)
        if self.planned is None or self._is_last_need(storage):
            self._in_use.append(weakref.ref(storage))
        return self._restored(saved, node.name())

    def _restored(self, saved: SavedTensor, node: str) -> torch.Tensor:
        tensor = saved.restore()
        if saved.kept is not None and self._host.check is not None:
            self._host.check.compare(saved.kept, tensor, node)
        return tensor

    def _can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether its bytes are a large storage's, on the device, and free to go once autograd alone holds them."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device != self._host.device:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._host.min_swap_bytes or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        if self._resident is None:
            self._resident = self._find_resident()
        return storage._cdata not in self._resident

    def _storage_of(self, tensor: torch.Tensor) -> SavedStorage:
        """The storage as it was saved before, unless it was written since: then its bytes are others."""
        identity = tensor.untyped_storage()._cdata
        known = self._by_storage.get(identity)
        if known is not None and known.version == tensor._version:
            return known
        storage = SavedStorage(self._host.engine_number, self.num_storages, tensor)
        self.num_storages += 1
        self._by_storage[identity] = self._by_number[storage.number] = storage
        return storage

    def _begin_node(self, running: tuple[int, int], name: str, storage: SavedStorage) -> None:
        self._end_node()
        self._node = running
        if self._needs is None:  # the model itself runs a backward
            self._needs, self.planned, self.recording = [], None, None
        if running[0] != self._task:
            self._task = running[0]
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._host.backward_begins(self)
        self._needs.append(storage.number)
        at = len(self._needs) - 1
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and self.planned.needs[at : at + 1] != (storage.number,):
            self._leave_plan()
        if self.planned is not None:
            self._act(self.planned.before_group(at))
            self._host.begin_op()
        elif self.recording is not None:
            held = [number for number, other in self._by_number.items() if other.is_held_elsewhere]
            self.recording.begin_group(name, storage.number, held)
            self.recording.begin("backward", self._present())

    def _end_node(self) -> None:
        """What the last node took back stays only if somebody will need it again before it is fetched again."""
        for reference in self._in_use:
            if (storage := reference()) is not None:
                storage.release()
        self._in_use.clear()

    def _end_backward(self) -> None:
        self._end_node()
        self._node = None
        if self.recording is not None:
            self.recording.end()
        self._host.backward_ends(self)

    def _leave_plan(self) -> None:
        """Goes over to another plan that fits what has happened, or to none."""
        left = self.planned
        assert left is not None
        for other in self._host.known_steps():
            if other is not left and other.goes_on_from(self._saves, self._needs):
                self.planned = other
                self._catch_up(other)
                return
        self.planned = None
        if self._needs:
            so_far = left.step.until_group(len(self._needs) - 1)
        else:
            so_far = left.step.until_pack(len(self._saves) - (self._needs is None))
            for storage in list(self._by_number.values()):
                _send_away(storage, self._host.tier)
        self.recording = Recording(self._host.memory, self._base_bytes, so_far)

    def _catch_up(self, planned: PlannedEvents) -> None:
        """Does what ``planned`` asked for at the events that have passed; the caller does it for the last one."""
        for pack in range(len(self._saves)):
            self._act(planned.after_pack(pack))
        if self._needs:
            self._act(planned.after_forward())
            for group in range(len(self._needs) - 1):
                self._act(planned.before_group(group))

    def _act(self, actions: Actions | None) -> None:
        if actions is None:
            return
        for swap in actions.outs:
            if (storage := self._by_number.get(swap.buffer)) is not None:
                storage.leave(swap.tier, swap.offset)
        for number in actions.releases:
            if (storage := self._by_number.get(number)) is not None:
                storage.release()
        for number in actions.ins:
            if (storage := self._by_number.get(number)) is not None:
                storage.come_back()

    def _is_last_need(self, storage: SavedStorage) -> bool:
        assert self.planned is not None and self._needs is not None
        return len(self._needs) > self.planned.last_need.get(storage.number, -1)

    def _present(self) -> list[int]:
        return [number for number, storage in self._by_number.items() if storage.is_on_device]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storages_of(tensors: Sequence[object]) -> frozenset[int]:
    """The identities of the storages of all plain tensors among ``tensors``, which must live on."""
    return frozenset(
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if type(tensor) in _PLAIN and isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    )


def _send_away(storage: SavedStorage, tier: str) -> None:
    storage.leave(tier, 0)
    storage.release()
