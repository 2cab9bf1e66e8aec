"""What happens when autograd saves a tensor, and when it needs it again? One forward, and the backwards through it.

A step follows a plan for as long as its events are those that were planned for. From the first other event on it is
served without one: what is saved stays as far as steps that are known left room for it, and whatever else is saved
leaves as soon as it may (`lmswap.eager.saved` has the rule), and is fetched when it is needed, which is slow; and it is
recorded, so that the next step like it can be planned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from lmswap.eager.actions import Actions, PlannedEvents
from lmswap.eager.alive import Alive
from lmswap.eager.check import SavedCheck
from lmswap.eager.presence import Presence
from lmswap.eager.recording import Recorded, Recording
from lmswap.eager.saved import SavedStorage, SavedTensor, is_torchs_own
from lmswap.execute import ops
from lmswap.execute.storage import has_plain_storage
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

    def spare_bytes(self) -> int:
        """What a step without a plan may keep of what it saves."""

    def backward_begins(self, step: EagerStep) -> None:
        """A backward pass has reached the model."""

    def begin_op(self) -> None:
        """The next op of a planned step begins, but for the first of each pass."""

    def backward_ends(self, step: EagerStep) -> None:
        """That pass is over; not called if it raised."""


# At each event so many storages that others held are tried again, the latest: some models collect thousands. All are
# tried when so many events have passed that it comes to the same.
_MOST_TRIED = 64


class _Departure(NamedTuple):
    """Where a storage is to go as soon as it may, and from which position of the plan on its memory is to be free."""

    tier: str
    offset: int
    release: int


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
        """``resident`` gives the identities of storages that live on whatever autograd does.

        Without a plan, and where it leaves its plan, it ``records`` what happens.
        """
        self._host, self._find_resident = host, resident
        self._resident: frozenset[int] | None = None  # asked for when a large tensor is saved
        self.kind, self.planned = kind, planned
        self.graph: int | None = planned.graph if planned is not None else None  # as it began, for records
        self.recording: Recording | None = None  # of a step without a plan, unless it cannot be planned for
        self._records, self._base_bytes = records, host.memory.used_tensor_bytes() if records else 0
        self.runs_backward = False  # inside of the forward
        self._streams = ops.find_engine(host.engine_number).streams
        self._stream = self._streams.current()  # that the model was called on
        self._storages = Alive[SavedStorage]()  # by number
        self._numbers: dict[int, int] = {}  # by the storage's identity
        self.num_storages = 0  # that were saved and can leave
        self._leaving: dict[int, _Departure] = {}  # by number: what others still hold
        self._num_events = 0  # since all of these were tried
        self._staying = set[int]()  # by number: what is kept without a plan
        self._spare_bytes = host.spare_bytes() if planned is None else 0  # what else may be
        self._saves: list[tuple[int, int]] = []
        self._needs: list[int] | None = None  # None while the forward runs
        self._task = -1  # autograd's number of the backward pass
        self._node: tuple[int, int] | None = None  # that pass, and the number of its node that runs
        self._in_use: list[weakref.ref[SavedStorage]] = []  # what that node took back, and no other will need
        if planned is None and records:
            self._record(Recorded()).begin("forward")

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Autograd saves ``tensor``."""
        tensor = tensor.detach()  # its grad_fn would own what it has saved: a cycle that nobody could collect
        if not self._can_leave(tensor):
            return SavedTensor(tensor, None)
        storage = self._storage_of(tensor)
        saved = SavedTensor(tensor, storage)
        self._saves.append((storage.number, storage.nbytes))
        position = len(self._saves)
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and self.planned.saves[position - 1 : position] != (self._saves[-1],):
            self._leave_plan(position)
        if self._host.check is not None:
            saved.by = self._host.check.saved_by(self._host.module_names)
        if self.planned is None:
            self._send_away(storage)
        self._reach(position)
        if self.planned is not None:
            self._host.begin_op()
        elif self.recording is not None:
            self.recording.pack(storage.number, storage.nbytes, tensor, self._host.module_names)
            self.recording.begin("forward")
        return saved

    def end_forward(self) -> None:
        """The model returns."""
        if self._needs is None:
            self._needs = []
        position = len(self._saves) + 1
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and len(self._saves) != len(self.planned.saves):
            self._leave_plan(position)
        self._reach(position)
        if self.recording is not None:
            self.recording.begin("loss")

    @property
    def order(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """What it has saved and needed until now, as in `Recorded`."""
        return tuple(self._saves), tuple(self._needs or ())

    @property
    def holds_storages(self) -> bool:
        """Whether anything that it saved and that can leave is needed still."""
        return next(iter(self._storages), None) is not None

    def make_way(self) -> None:
        """Another forward begins before the backward of this one: no plan was made for what both hold together."""
        self.planned, self._spare_bytes = None, 0
        self._staying.clear()
        if self.recording is not None:
            self.recording.presence.watch_all()
        self._send_all_away()

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Autograd needs what it saved."""
        saved.check()
        storage = saved.storage
        if storage is None:
            return saved.restore()
        node: Any = torch._C._current_autograd_node()
        if node is None:  # somebody looks at what a grad_fn has saved
            if self.recording is not None:
                self.recording.presence.watch(storage)
            tensor = self._restored(saved, "a look at grad_fn")
            storage.is_given_to_others()
            self._let_go(storage)
            return tensor
        running = (torch._C._current_graph_task_id(), node._sequence_nr())
        stayed_bytes = self.recording.presence.watch(storage) if self.recording is not None else 0
        if running != self._node:
            self._begin_node(running, node.name(), storage)
        elif self.recording is not None:
            self.recording.take_more(storage.number, stayed_bytes)
        if self.planned is None or self._is_last_need(storage):
            self._in_use.append(weakref.ref(storage))
        tensor = self._restored(saved, node.name())
        if _runs_foreign_code(node):
            storage.is_given_to_others()
        return tensor

    # Where Dynamo looks on, it would trace them. Made here: that takes longer than a short op.
    untraced_pack: Any = torch.compiler.disable(pack)  # type: ignore[no-untyped-call]
    untraced_unpack: Any = torch.compiler.disable(unpack)  # type: ignore[no-untyped-call]

    def _restored(self, saved: SavedTensor, node: str) -> torch.Tensor:
        tensor, storage = saved.restore(), saved.storage
        if storage is not None:
            storage.is_used_on(self._streams.current())
        if self._host.check is None or saved.by is None or storage is None or storage.original is None:
            return tensor
        if not storage.lies_in(storage.original.untyped_storage()):
            self._host.check.compare(saved.by, saved.view_of(storage.original), tensor, node)
        return tensor

    def _can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether its bytes are a large storage's, on the device, and free to go once autograd alone holds them."""
        if not _is_plain(tensor) or tensor.device != self._host.device:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._host.min_swap_bytes:
            return False
        if self._resident is None:
            self._resident = self._find_resident()
        return storage._cdata not in self._resident and is_torchs_own(storage)

    def _storage_of(self, tensor: torch.Tensor) -> SavedStorage:
        """The storage as it was saved before, if it was; an address may have come to another one since."""
        lies_in, stream = tensor.untyped_storage(), self._streams.current()
        if stream != self._stream:
            self._streams.together |= {stream, self._stream}
        storage = self._storages.get(self._numbers.get(lies_in._cdata))
        if storage is not None and storage.lies_in(lies_in):
            storage.is_used_on(stream)
        else:
            storage = SavedStorage(self._host.engine_number, self.num_storages, tensor, stream, self._host.check)
            self.num_storages += 1
            self._numbers[lies_in._cdata] = storage.number
            self._storages[storage.number] = storage
        if self.recording is not None:
            self.recording.presence.watch(storage)
        return storage

    def _begin_node(self, running: tuple[int, int], name: str, storage: SavedStorage) -> None:
        self._end_node()
        self._node = running
        if self._needs is None:  # the model itself runs a backward
            self._needs, self.planned, self.recording, self.runs_backward = [], None, None, True
        if running[0] != self._task:
            self._task = running[0]
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._host.backward_begins(self)
        self._needs.append(storage.number)
        at = len(self._needs) - 1
        position = len(self._saves) + 2 + at
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and self.planned.needs[at : at + 1] != (storage.number,):
            self._leave_plan(position)
        self._reach(position)
        if self.planned is not None:
            self._host.begin_op()
        elif self.recording is not None:
            self.recording.begin_group(name, storage.number, self._held_by_others() if at == 0 else ())
            self.recording.begin("backward")

    def _held_by_others(self) -> set[int]:
        """The numbers of those that could not leave until now."""
        staying = (storage for storage in self._storages if storage.number in self._staying)
        return {*self._leaving, *(storage.number for storage in staying if not storage.may_leave())}

    def _end_node(self) -> None:
        """What the last node took back stays only if somebody will need it again before it is fetched again."""
        for reference in self._in_use:
            if (storage := reference()) is not None:
                self._let_go(storage)
        self._in_use.clear()

    def _let_go(self, storage: SavedStorage) -> None:
        if not storage.release() and self.planned is None:
            self._send_away(storage)

    def _end_backward(self) -> None:
        self._end_node()
        self._node = None
        if self.recording is not None:
            self.recording.end()
        self._host.backward_ends(self)

    def _leave_plan(self, position: int) -> None:
        """At that position, goes over to another plan that fits what has happened, or to none."""
        left = self.planned
        assert left is not None
        for other in self._host.known_steps():
            if other is not left and other.goes_on_from(self._saves, self._needs):
                self.planned = other
                self._leaving.clear()
                for passed in range(1, position):
                    self._act(other.at(passed))
                return
        self.planned, self._spare_bytes = None, self._host.spare_bytes()
        if self._needs:
            so_far = left.step.until_group(len(self._needs) - 1)
        else:
            so_far = left.step.until_pack(len(self._saves) - (self._needs is None))
            self._send_all_away()
        if self._records:
            self._record(so_far)

    def _reach(self, position: int) -> None:
        """The step is at that position of its plan, if it has one: does what is due, and what could not be done yet."""
        self._num_events += 1
        tries_all = self._num_events * _MOST_TRIED >= len(self._leaving)
        if tries_all:
            self._num_events = 0
        for number in list(self._leaving if tries_all else islice(reversed(self._leaving), _MOST_TRIED)):
            tier, offset, release = self._leaving[number]
            storage = self._storages.get(number)
            if storage is None or number in self._staying or storage.leave(tier, offset):
                del self._leaving[number]
            if storage is not None and release <= position and number not in self._staying:
                storage.release()
        if self.planned is not None:
            self._act(self.planned.at(position))

    def _act(self, actions: Actions | None) -> None:
        if actions is None:
            return
        for swap in actions.outs:
            if (storage := self._storages.get(swap.buffer)) is not None and not storage.leave(swap.tier, swap.offset):
                self._leaving[swap.buffer] = _Departure(swap.tier, swap.offset, swap.release)
        for number in actions.releases:
            if (storage := self._storages.get(number)) is not None and number not in self._leaving:
                storage.release()
        for number in actions.ins:
            self._leaving.pop(number, None)
            if (storage := self._storages.get(number)) is not None:
                storage.come_back()

    def _send_all_away(self) -> None:
        self._leaving.clear()
        for storage in self._storages:
            self._send_away(storage)
        self._reach(0)

    def _send_away(self, storage: SavedStorage) -> None:
        """Without a plan: ``storage`` is to leave as soon as it may, unless there is room for it."""
        if storage.number in self._staying:
            return
        if storage.is_on_device and storage.nbytes <= self._spare_bytes:
            self._spare_bytes -= storage.nbytes
            self._staying.add(storage.number)
        else:
            self._leaving[storage.number] = _Departure(self._host.tier, offset=0, release=0)

    def _is_last_need(self, storage: SavedStorage) -> bool:
        assert self.planned is not None and self._needs is not None
        return len(self._needs) > self.planned.last_need.get(storage.number, -1)

    def _record(self, so_far: Recorded) -> Recording:
        check = self._host.check
        kept_bytes = check.kept_bytes if check is not None else lambda: 0
        presence = Presence(self._storages, self._staying)
        self.recording = Recording(self._host.memory, self._base_bytes, so_far, presence, kept_bytes)
        return self.recording


def storages_of(tensors: Sequence[object]) -> frozenset[int]:
    """The identities of the storages of all plain tensors among ``tensors``, which must live on."""
    return frozenset(
        tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor) and _is_plain(tensor)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether what its storage holds is all of ``tensor``."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_plain_storage(tensor)


def _runs_foreign_code(node: Any) -> bool:
    """Whether a node of the backward is an extension's, which may write what it has saved; torch's own do not."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or node.name().startswith("torch::autograd::Cpp")
