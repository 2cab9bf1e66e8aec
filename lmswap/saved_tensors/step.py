"""One step under saved-tensor hooks: a forward and the backwards through it, with or without a plan.

A step follows a plan while its events are those planned for. From the first different event on it has none: saved
storages stay resident within the room that known steps left, all others are swapped out as soon as
`saved_storage` allows it and fetched on demand, which is slow. Such a step is recorded, so that the next one like it
can be planned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from lmswap.hardware.memory import DeviceMemory
from lmswap.runtime import ops
from lmswap.runtime.storage import has_plain_storage
from lmswap.saved_tensors.plan_actions import Actions, PlannedEvents
from lmswap.saved_tensors.recording import Recorded, Recording
from lmswap.saved_tensors.residency import ResidencyTracker
from lmswap.saved_tensors.saved_storage import SavedStorage, SavedTensor, SwappableTensor, is_torch_allocated
from lmswap.saved_tensors.weak_values import WeakValues
from lmswap.torch_compat.autograd import current_graph_task_id, current_node, queue_callback, sequence_number
from lmswap.torch_compat.tensors import storage_id
from lmswap.user_frame import user_line_and_module
from lmswap.verify.saved_tensors import SavedCheck


class StepKind(NamedTuple):
    """What is known of a step before it has saved anything."""

    inputs: tuple[tuple[torch.Size, torch.dtype, bool], ...]  # with whether gradients are wanted
    trains: bool  # the model's mode
    is_autocast: bool

    def growth_from(self, known: StepKind) -> float:
        """Return how many times as many values as in ``known`` the input has that has grown most; at least 1.

        Few values may decide on most of the memory, as the edges of a graph do.
        """
        return max([1.0, *(own / max(1, its) for own, its in self.paired_values(known))])

    def paired_values(self, known: StepKind) -> Sequence[tuple[int, int]]:
        """Return the number of values in each input, here and in ``known``; in all, if they have not as many inputs."""
        own, its = ([shape.numel() for shape, *_ in each.inputs] for each in (self, known))
        return list(zip(own, its, strict=True)) if len(own) == len(its) else [(sum(own), sum(its))]


class HookContext(Protocol):
    """What a step uses of the model that it belongs to."""

    engine_number: int
    device: torch.device
    tier: str
    min_swap_bytes: int
    memory: DeviceMemory
    module_names: Mapping[int, str]  # by identity
    check: SavedCheck | None  # in verification

    @property
    def reads_ahead(self) -> bool:
        """Whether weights have been fetched for the backward that this thread runs."""

    def known_steps(self) -> Sequence[PlannedEvents]:
        """Return the steps with plans, the most likely first."""

    def spare_bytes(self, kind: StepKind | None) -> int:
        """Return the saved bytes that a step of ``kind`` without a plan may keep resident."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` as a node reads it: on the device, if it is a non-resident weight that was fetched."""

    def backward_begins(self, step: HookedStep) -> None:
        """Note that a backward pass has reached the model."""

    def begin_op(self) -> None:
        """Note the start of an op of a planned step, except for the first of each pass."""

    def backward_ends(self, step: HookedStep) -> None:
        """Note the end of that pass; not called if it raised."""


# Pending swap-outs retried at each event, latest first: some models collect thousands of tensors. All are retried once
# that many events have passed that the amortized cost is the same.
_MAX_RETRIED = 64

# Without a plan: bytes that may be resident while they are on their way to the tier, so that nothing waits for each of
# many small copies, or on their way back before they are needed. A larger storage is waited for at once. It is half of
# the growth that budgets leave room for (`lmswap.session.allowance.GROWTH_BYTES`).
_MAX_IN_TRANSIT_BYTES = 4 * 2**20


class _PendingSwapOut(NamedTuple):
    """A swap-out deferred while the storage has other owners; its memory is to be free from position ``release`` on."""

    tier: str
    offset: int
    release: int


class HookedStep:
    """Implements the saved-tensor hooks of one step. Saved tensors own the step; it owns none but those in transit."""

    def __init__(
        self,
        context: HookContext,
        planned: PlannedEvents | None,
        resident: Callable[[], frozenset[int]],
        *,
        kind: StepKind | None,
        records: bool,
    ) -> None:
        """``resident`` returns the identities of storages that outlive the step, whatever autograd does.

        Where the step has no plan, or leaves it, it is recorded if it ``records``.
        """
        self._context, self._find_persistent = context, resident
        self._min_swap_bytes = context.min_swap_bytes
        self._persistent: frozenset[int] | None = None  # found when the first large tensor is saved
        self.kind, self.planned = kind, planned
        self.graph: int | None = planned.graph if planned is not None else None  # of the plan at its start, for records
        self.recording: Recording | None = None  # of a step without a plan, if it can be planned
        self._records, self._base_bytes = records, context.memory.used_tensor_bytes() if records else 0
        self.has_inner_backward = False  # inside the forward
        self._streams = ops.find_engine(context.engine_number).streams
        self._stream = self._streams.current()  # on which the model was called
        self._saving_streams = {self._stream}  # of all that this step saves
        self._storages = WeakValues[SavedStorage]()  # by number
        self._numbers: dict[int, int] = {}  # by the storage's identity
        self.num_storages = 0  # saved and swappable
        self.awaits_any_unpack = False  # the unpack of a tensor that is not swappable begins the backward
        self._pending: dict[int, _PendingSwapOut] = {}  # by number, while other owners prevent the swap-out
        self._num_events = 0  # since all of these were retried
        self._kept = set[int]()  # numbers of storages kept resident without a plan
        self._spare_bytes = context.spare_bytes(kind) if planned is None else 0  # room for more of these
        # Without a plan, by number: storages whose copy out has been queued, and those prefetched. Memory of what dies
        # meanwhile is free only when its copy has been waited for.
        self._in_transit: dict[int, SavedStorage] = {}
        self._transit_bytes = 0
        self._next_prefetch: int | None = None  # number of the storage to prefetch next; None before the backward
        self._saves: list[tuple[int, int]] = []
        self._needs: list[int] | None = None  # None while the forward runs
        self._task = -1  # autograd's graph task of the backward pass
        self._node: tuple[int, int] | None = None  # that graph task, and the sequence number of its running node
        self._in_use: list[weakref.ref[SavedStorage]] = []  # unpacked by that node, and needed by no later one
        if planned is None and records:
            self._record(Recorded()).begin("forward", 0)

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Pack hook: autograd saves ``tensor``."""
        tensor = tensor.detach()  # its grad_fn owns what it has saved: a cycle that cannot be collected
        untyped = _plain_type_storage(tensor)
        # First the size: most saved tensors are small.
        if untyped is None or untyped.nbytes() < self._min_swap_bytes or not self._is_swappable(tensor, untyped):
            if self.recording is not None:
                is_of_step = untyped is not None and self._is_swappable(tensor, untyped)
                self.recording.save_in_place(untyped if is_of_step else None)
            return SavedTensor(tensor)
        storage = self._storage_of(tensor, untyped)
        del untyped  # an owner
        saved = SwappableTensor(tensor, storage)
        self._saves.append((storage.number, storage.nbytes))
        position = len(self._saves)
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and self.planned.saves[position - 1 : position] != (self._saves[-1],):
            self._leave_plan(position)
        if self._context.check is not None:
            source, module = user_line_and_module(self._context.module_names)
            saved.made_by = f"module '{module}'" + (f" ({source})" if source else "")
        if self.planned is None:
            self._evict(storage)
        self._advance(position)
        if self.planned is not None:
            self._context.begin_op()
        elif self.recording is not None:
            self.recording.pack(storage.number, storage.nbytes, tensor, self._context.module_names)
            self.recording.begin("forward", self._transit_bytes)
        return saved

    def end_forward(self) -> None:
        """Note that the model's forward returns."""
        self._find_persistent = frozenset  # the caller's holds the inputs, and the step may be kept until the next call
        if self._needs is None:
            self._needs = []
        position = len(self._saves) + 1
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and len(self._saves) != len(self.planned.saves):
            self._leave_plan(position)
        self._advance(position)
        self._end_transits()
        if self.recording is not None:
            self.recording.begin("loss", self._transit_bytes)

    @property
    def event_sequence(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The packs and needs so far, as in `Recorded`."""
        return tuple(self._saves), tuple(self._needs or ())

    @property
    def holds_storages(self) -> bool:
        """Whether any swappable storage that it saved is still needed."""
        return next(iter(self._storages), None) is not None

    def drop_plan(self) -> None:
        """Evict all: another forward begins before this one's backward, and no plan covers both at once."""
        self.planned, self._spare_bytes = None, 0
        self._kept.clear()
        if self.recording is not None:
            self.recording.residency.watch_all()
        self._evict_all()

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Unpack hook: autograd needs a saved tensor."""
        if not isinstance(saved, SwappableTensor):
            if self.awaits_any_unpack and current_node() is not None:
                self.awaits_any_unpack = False
                queue_callback(self._end_backward)
                self._context.backward_begins(self)
            tensor = saved.restore()
            if self._context.reads_ahead and (reader := current_node()) is not None and not _is_extension_node(reader):
                return self._context.read(tensor)
            return tensor
        saved.check()
        storage = saved.storage
        transit_bytes = self._exit_transit(storage)
        node = current_node()
        if node is None:  # read as an attribute of a grad_fn
            if self.recording is not None:
                self.recording.residency.watch(storage)
            tensor = self._restored(saved, "an attribute of a grad_fn")
            storage.invalidate_copy()
            self._release(storage)
            return tensor
        running = (current_graph_task_id(), sequence_number(node))
        kept_bytes = self.recording.residency.watch(storage) if self.recording is not None else 0
        if running != self._node:
            self._begin_node(running, node.name(), storage, was_in_transit=transit_bytes > 0)
        elif self.recording is not None:
            self.recording.unpack_more(storage.number, transit_bytes + kept_bytes)
        if self.planned is None or self._is_last_use(storage):
            self._in_use.append(weakref.ref(storage))
        tensor = self._restored(saved, node.name())
        if _is_extension_node(node):
            storage.invalidate_copy()
        return tensor

    def _restored(self, saved: SwappableTensor, node: str) -> torch.Tensor:
        tensor, storage = saved.restore(), saved.storage
        storage.note_use_on(self._streams.current())
        if self._context.check is None or saved.made_by is None or storage.original is None:
            return tensor
        if not storage.occupies(storage.original.untyped_storage()):
            self._context.check.compare(saved.made_by, saved.view_of(storage.original), tensor, node)
        return tensor

    def _is_swappable(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether its storage, if it is large enough, can be evicted once autograd alone owns it."""
        if not has_plain_storage(tensor) or tensor.device != self._context.device:
            return False
        if self._persistent is None:
            self._persistent = self._find_persistent()
        return storage_id(storage) not in self._persistent and is_torch_allocated(storage)

    def _storage_of(self, tensor: torch.Tensor, untyped: torch.UntypedStorage) -> SavedStorage:
        """Return the record of the tensor's storage, an existing one unless its address has been reused since."""
        stream = self._streams.current()
        if stream != self._stream:
            self._saving_streams.add(stream)
            self._streams.are_multiple = True
        storage = self._storages.get(self._numbers.get(storage_id(untyped)))
        if storage is not None and storage.occupies(untyped):
            storage.note_use_on(stream)
        else:
            storage = SavedStorage(
                self._context.engine_number,
                self.num_storages,
                tensor,
                stream,
                self._saving_streams,
                keeps_original=self._context.check is not None,
            )
            self.num_storages += 1
            self._numbers[storage_id(untyped)] = storage.number
            self._storages[storage.number] = storage
        if self.recording is not None:
            self.recording.residency.watch(storage)
        return storage

    def _begin_node(self, running: tuple[int, int], name: str, storage: SavedStorage, *, was_in_transit: bool) -> None:
        self._end_node()
        self._node = running
        if self._needs is None:  # a backward inside the model
            self._needs, self.planned, self.recording, self.has_inner_backward = [], None, None, True
        if running[0] != self._task:
            self._task = running[0]
            queue_callback(self._end_backward)
            self._context.backward_begins(self)
        self._needs.append(storage.number)
        at = len(self._needs) - 1
        position = len(self._saves) + 2 + at
        if self.recording is not None:
            self.recording.end()
        elif self.planned is not None and self.planned.needs[at : at + 1] != (storage.number,):
            self._leave_plan(position)
        self._advance(position)
        if self.planned is not None:
            self._context.begin_op()
        elif self.recording is not None:
            self.recording.begin_group(name, storage.number, self._held_by_others() if at == 0 else ())
        if self.planned is None and (was_in_transit or not storage.is_on_device):
            self._prefetch(storage)
        if self.recording is not None:
            self.recording.begin("backward", self._transit_bytes)

    def _held_by_others(self) -> set[int]:
        """Return the numbers of storages that others have held until now."""
        staying = (storage for storage in self._storages if storage.number in self._kept)
        return {*self._pending, *(storage.number for storage in staying if not storage.can_swap_out())}

    def _end_node(self) -> None:
        """Release what the last node unpacked: with a plan what no later node needs, without one all."""
        for reference in self._in_use:
            if (storage := reference()) is not None:
                self._release(storage)
        self._in_use.clear()

    def _release(self, storage: SavedStorage) -> None:
        if not storage.release():
            if self.planned is None:
                self._evict(storage)
        elif self.recording is not None:
            self.recording.residency.note_released(storage)

    def _end_backward(self) -> None:
        self._end_node()
        self._node = self._next_prefetch = None
        if self.recording is not None:
            self.recording.end()
        self._end_transits()
        self._context.backward_ends(self)

    def _leave_plan(self, position: int) -> None:
        """Switch at that position to another plan that matches the events so far, or to none."""
        left = self.planned
        assert left is not None
        for other in self._context.known_steps():
            if other is not left and other.can_match(self._saves, self._needs):
                self.planned = other
                self._pending.clear()
                for passed in range(1, position):
                    self._execute(other.at(passed))
                return
        self.planned, self._spare_bytes = None, self._context.spare_bytes(self.kind)
        if self._needs:
            so_far = left.step.until_group(len(self._needs) - 1)
        else:
            so_far = left.step.until_pack(len(self._saves) - (self._needs is None))
            self._evict_all()
        if self._records:
            self._record(so_far)

    def _advance(self, position: int) -> None:
        """Execute the actions at a position of the plan, if there is one, and retry pending swap-outs."""
        if self._pending:
            self._retry(position)
        if self.planned is not None:
            self._execute(self.planned.at(position))

    def _retry(self, position: int) -> None:
        self._num_events += 1
        retries_all = self._num_events * _MAX_RETRIED >= len(self._pending)
        if retries_all:
            self._num_events = 0
        for number in list(self._pending if retries_all else islice(reversed(self._pending), _MAX_RETRIED)):
            tier, offset, release = self._pending[number]
            storage = self._storages.get(number)
            if storage is None or number in self._kept:
                del self._pending[number]
            elif self.planned is not None:
                if storage.swap_out(tier, offset):
                    del self._pending[number]
                if release <= position:
                    storage.release()
            elif storage.swap_out_if_unshared(tier, offset):
                del self._pending[number]
                if storage.is_on_device:
                    self._enter_transit(storage)

    def _execute(self, actions: Actions | None) -> None:
        if actions is None:
            return
        for swap in actions.swap_outs:
            storage = self._storages.get(swap.buffer)
            if storage is not None and not storage.swap_out(swap.tier, swap.offset):
                self._pending[swap.buffer] = _PendingSwapOut(swap.tier, swap.offset, swap.release)
        for number in actions.releases:
            if (storage := self._storages.get(number)) is not None and number not in self._pending:
                storage.release()
        for number in actions.swap_ins:
            self._pending.pop(number, None)
            if (storage := self._storages.get(number)) is not None:
                storage.swap_in()

    def _enter_transit(self, storage: SavedStorage) -> None:
        """Note that ``storage`` is resident while it is copied; wait for the oldest copies if there are too many."""
        self._exit_transit(storage)
        self._in_transit[storage.number] = storage
        self._transit_bytes += storage.nbytes
        if self.recording is not None:
            self.recording.residency.ignore(storage.number)
        while self._transit_bytes > _MAX_IN_TRANSIT_BYTES:
            self._end_transit(next(iter(self._in_transit.values())))

    def _exit_transit(self, storage: SavedStorage) -> int:
        """Count ``storage`` no longer; return its bytes if it was counted, else 0."""
        if self._in_transit.pop(storage.number, None) is None:
            return 0
        self._transit_bytes -= storage.nbytes
        return storage.nbytes

    def _end_transit(self, storage: SavedStorage) -> None:
        self._exit_transit(storage)
        storage.await_swap_in()  # if it was prefetched
        self._release(storage)
        if self.recording is not None and storage.is_on_device:
            self.recording.residency.watch(storage)

    def _end_transits(self) -> None:
        for storage in tuple(self._in_transit.values()):
            self._end_transit(storage)

    def _prefetch(self, storage: SavedStorage) -> None:
        """Swap in ``storage``, and what was saved before it: a backward needs most tensors in reverse order."""
        storage.swap_in()
        before = storage.number - 1
        self._next_prefetch = before if self._next_prefetch is None else min(before, self._next_prefetch)
        while self._next_prefetch >= 0:
            following = self._storages.get(self._next_prefetch)
            if following is not None and not following.is_on_device:
                if self._transit_bytes + following.nbytes > _MAX_IN_TRANSIT_BYTES:
                    return
                following.swap_in()
                self._enter_transit(following)
            self._next_prefetch -= 1

    def _evict_all(self) -> None:
        self._pending.clear()
        for storage in self._storages:
            self._evict(storage)
        self._advance(0)
        self._end_transits()

    def _evict(self, storage: SavedStorage) -> None:
        """Without a plan: keep ``storage`` if there is room, else swap it out as soon as possible."""
        if storage.number in self._kept:
            return
        if storage.is_on_device and storage.nbytes <= self._spare_bytes:
            self._spare_bytes -= storage.nbytes
            self._kept.add(storage.number)
        else:
            # The same offset for all: the tier places those that find it occupied elsewhere.
            self._pending[storage.number] = _PendingSwapOut(self._context.tier, offset=0, release=0)

    def _is_last_use(self, storage: SavedStorage) -> bool:
        assert self.planned is not None and self._needs is not None
        return len(self._needs) > self.planned.last_group.get(storage.number, -1)

    def _record(self, so_far: Recorded) -> Recording:
        residency = ResidencyTracker(self._storages, self._kept)
        self.recording = Recording(self._context.memory, self._base_bytes, so_far, residency)
        return self.recording


class LazyHookedStep:
    """Serve saved-tensor hooks by a step created at the first saved tensor: outside of graphs there is mostly none."""

    def __init__(self, make: Callable[[], HookedStep]) -> None:
        self._make = make
        self.step: HookedStep | None = None

    def begin(self) -> HookedStep:
        """Return the step, created if there is none yet."""
        if self.step is None:
            self.step = self._make()
        return self.step

    # Dynamo would trace the hooks where it is active. Wrapped once, here: wrapping costs more than a short op.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Autograd saves ``tensor``."""
        return self.begin().pack(tensor)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Autograd needs what it saved."""
        return self.begin().unpack(saved)


def storages_of(tensors: Sequence[object]) -> frozenset[int]:
    """Return the identities of the storages of all tensors among ``tensors``, which must stay resident."""
    found = map(_plain_type_storage, tensors)
    return frozenset([storage_id(storage) for storage in found if storage is not None])


def _plain_type_storage(tensor: object) -> torch.UntypedStorage | None:
    """Return the storage of a tensor of torch's own types; None of others, and of those without one."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return None
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # sparse tensors, and those of torch.func's transforms
        return None


def _is_extension_node(node: Any) -> bool:
    """Return whether a backward node is an extension's, which may write saved tensors; torch's own do not."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or node.name().startswith("torch::autograd::Cpp")
