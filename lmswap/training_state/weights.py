"""The weights that plans place: a model's parameters and buffers, resident on the device or in their host copies.

A plan decides for each weight that its step reads. One that it moves is non-resident outside of steps; the step fetches
it from there. What steps write is not placed: it stays resident. So does what is trained, unless the updates of a given
optimizer fetch it, see `lmswap.training_state.optimizer_state`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lmswap.errors import TierError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.runtime.host_copies import HostCopies, is_held_elsewhere
from lmswap.runtime.storage import has_plain_storage, held_bytes, moved_with_parts, parts, wraps_others
from lmswap.torch_compat.process_groups import is_distributed
from lmswap.torch_compat.tensors import storage_id, swap_tensors
from lmswap.training_state import TrainingState
from lmswap.training_state.optimizer_state import updated_parameters


@dataclass(frozen=True)
class _Group:
    """The parameters and buffers that share one storage, which is placed as one."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    storage: torch.UntypedStorage

    @property
    def is_held_elsewhere(self) -> bool:
        """See `lmswap.runtime.host_copies.is_held_elsewhere`."""
        return is_held_elsewhere(self.storage, self.tensors)


class Placeable(NamedTuple):
    """The weights that a plan may place: their names, the bytes of parameters among them, and of those resident now.

    Those in ``trained`` it may place although steps differentiate them, others only while no step does.
    """

    names: Collection[str]
    trained: Collection[str]
    parameter_bytes: int
    resident_bytes: int


class Weights:
    """The parameters and buffers of one model as weights that plans place, by their names."""

    def __init__(
        self,
        trained: TrainingState,
        host_copies: HostCopies,
        *,
        min_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        """Tensors whose storages have ``min_bytes`` can be placed once `manage` is called; ``note`` reports.

        Of the buffers only those that the model has then: what replaces one is the state of steps, as a cache is.
        """
        self._parameters, self._buffers = trained.parameters, trained.buffers
        self._optimizers = trained.optimizers
        self._managed_buffers: Mapping[str, torch.Tensor] = {}
        self._host_copies, self._min_bytes, self._note = host_copies, min_bytes, note
        self._written: frozenset[str] = frozenset()  # by steps, or differentiated and not updated in chunks
        self._kept: dict[str, int] = {}  # resident ones that plans count, by the first name: their bytes
        self.is_managed = False

    def manage(self) -> int:
        """Let plans place weights from now on; until there are plans, all are non-resident.

        On several ranks what is trained is not: DistributedDataParallel would hold it in its host copy for good.
        On a CPU resident ones move to memory of the heap that counts them, unless something beside the model holds
        theirs.

        Returns:
            The bytes of all parameters and buffers, which count from now on.

        Raises:
            TierError: the tier has no room; plans place none.
        """
        self.is_managed = True
        self._managed_buffers = weakref.WeakValueDictionary(self._buffers())
        sizes: dict[int, int] = {}  # by storage
        for name, tensor in self._tensors().items():
            if has_plain_storage(tensor):
                sizes[storage_id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
            elif (nbytes := held_bytes(tensor)) >= self._min_bytes:
                what = f"'{name}' ({format_bytes(nbytes)})"
                self._note(f"{what} is not swapped: it is a {type(tensor).__name__} without plain bytes")
        self._written = self._trained_names() if is_distributed() else frozenset()
        try:
            self.place(())
        except TierError:
            self.restore()
            self.is_managed = False
            raise
        finally:
            self._written = frozenset()
        for group in self._groups():
            is_resident = self._host_copies.find(group.storage) is None
            if group.storage.device.type == "cpu" and is_resident and not group.is_held_elsewhere:
                self._host_copies.move_to_heap(group.storage)
        return sum(sizes.values())

    def load(self) -> None:
        """Move weights that can be placed from the CPU to host copies of the device; the CPU's memory is freed.

        Raises:
            TierError: the tier has no room.
        """
        groups = self._groups(torch.device("cpu"))
        while groups:  # each is freed when it has been copied
            group = groups.pop()
            storage = self._host_copies.receive(group.storage)
            for tensor in group.tensors:
                offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
                made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
                tensor.data = made.set_(storage, offset, shape, stride)
        for tensor in self._whole().values():
            if tensor.device != self._host_copies.device and wraps_others(tensor) and not tensor.requires_grad:
                swap_tensors(tensor, moved_with_parts(tensor, self._host_copies.device))

    def restore(self) -> int:
        """Make all weights resident, but for those whose address something else may hold; return the bytes of these.

        Raises:
            TransferError: a copy failed.
        """
        left_bytes = 0
        for group in self._groups():
            if not group.is_held_elsewhere:
                self._host_copies.move_in(group.storage)
            elif self._host_copies.find(group.storage) is not None:
                left_bytes += group.storage.nbytes()
        return left_bytes

    def placeable(self) -> Placeable:
        """Return the weights that a plan may place now."""
        names, trained = set[str](), set[str]()
        updated = updated_parameters(self._optimizers)
        parameter_bytes = resident_bytes = 0
        for group in self._groups() if self.is_managed else ():
            if not self._written.isdisjoint(group.names):
                continue
            nbytes = group.storage.nbytes()
            if group.is_held_elsewhere:
                self._note_held(group)
                continue
            names.update(group.names)
            # Of parameters that share memory each chunk of an update would fetch, and write back, all.
            if len(group.tensors) == 1 and id(group.tensors[0]) in updated:
                trained.update(group.names)
            parameter_bytes += nbytes * any(isinstance(tensor, nn.Parameter) for tensor in group.tensors)
            resident_bytes += nbytes * (self._host_copies.find(group.storage) is None)
        return Placeable(names, trained, parameter_bytes, resident_bytes)

    def readable_ahead(self, *, trained: bool) -> list[torch.UntypedStorage]:
        """Return the non-resident parameters of which calls without a graph may read copies; ``trained`` ones, too."""
        return [
            group.storage
            for group in (self._groups() if self.is_managed and self._host_copies else ())
            if self._host_copies.find(group.storage) is not None
            and all(isinstance(each, nn.Parameter) for each in group.tensors)
            and (trained or not any(each.requires_grad for each in group.tensors))
            and not group.is_held_elsewhere  # what holds it may write it, unseen
        ]

    def names(self) -> dict[int, str]:
        """Return the first name of each parameter and each buffer that can be placed, by `id`."""
        return {id(tensor): name for name, tensor in reversed([*self._tensors().items()])}

    def note_written(self, names: Collection[str]) -> bool:
        """Place weights of these ``names`` no more, as steps write or train them; whether any was placeable."""
        newly = frozenset(names) - self._written
        self._written |= newly
        for group in self._groups() if self.is_managed and newly else ():
            if not newly.isdisjoint(group.names):
                if not group.is_held_elsewhere:
                    self._host_copies.move_in(group.storage)
                self._kept.pop(group.names[0], None)
        return self.is_managed and bool(newly)

    def place(self, plans: Sequence[tuple[Program, Plan]]) -> bool:
        """Make those weights resident that all ``plans`` which name them keep, and all others non-resident.

        Returns whether any was moved.

        Args:
            plans: of the steps that run next; without any, all weights are non-resident.

        Raises:
            TierError: the tier has no room; weights stay where they are.
            TransferError: a copy failed.
        """
        if not self.is_managed:
            return False
        kept, moved = set[str](), set[str]()
        for program, plan in plans:
            swapped = {swap.buffer for swap in plan.swaps}
            for buffer in program.buffers:
                if buffer.kind is BufferKind.WEIGHT:
                    (moved if buffer.id in swapped else kept).add(buffer.name)
        self._kept = {}
        entering: list[torch.UntypedStorage] = []
        leaving: list[torch.UntypedStorage] = []
        for group in self._groups():
            is_resident = self._host_copies.find(group.storage) is None
            is_written, is_moved = (not names.isdisjoint(group.names) for names in (self._written, moved))
            is_kept = not (kept.isdisjoint(group.names) or is_written or is_moved)
            if (is_written or is_kept) is not is_resident:
                if group.is_held_elsewhere:
                    self._note_held(group)
                else:
                    (leaving if is_resident else entering).append(group.storage)
            if is_kept:
                self._kept[group.names[0]] = group.storage.nbytes()
        self._host_copies.move_out(leaving)  # first: it frees memory
        for storage in entering:
            self._host_copies.move_in(storage)
        return bool(leaving or entering)

    @property
    def kept_bytes(self) -> int:
        """Bytes of resident weights that the placed plans count as parts of their steps."""
        return sum(self._kept.values())

    def _trained_names(self) -> frozenset[str]:
        """Return the names of what is trained, and not updated in chunks."""
        updated = updated_parameters(self._optimizers)
        trained = ((name, each) for name, each in self._parameters().items() if each.requires_grad)
        return frozenset(name for name, each in trained if id(each) not in updated)

    def _note_held(self, group: _Group) -> None:
        self._note(
            f"'{group.names[0]}' ({format_bytes(group.storage.nbytes())}) is not swapped: something beside the model "
            "holds its memory, as a numpy array, a detached tensor or a view of it does"
        )

    def _whole(self) -> dict[str, torch.Tensor]:
        """Return the parameters, and those buffers that the model had when they were first managed."""
        managed = self._managed_buffers
        buffers = self._buffers() if managed else {}
        return {**self._parameters(), **{name: each for name, each in buffers.items() if managed.get(name) is each}}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of `_whole`; of frozen ones that wrap others these."""
        found = dict[str, torch.Tensor]()
        for name, tensor in self._whole().items():
            # The gradient of a tensor that wraps others would wrap others, too.
            inner = [((), tensor)] if tensor.requires_grad else parts(tensor)
            found.update((".".join((name, *path)), each) for path, each in inner)
        return found

    def _groups(self, lies_on: torch.device | None = None) -> list[_Group]:
        """Return the tensors with plain memory that are large enough, by storage; by default those on the device."""
        lies_on = lies_on or self._host_copies.device
        found: dict[int, tuple[list[str], list[torch.Tensor]]] = {}
        for name, tensor in self._tensors().items():
            if not has_plain_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self._min_bytes and tensor.device == lies_on:
                names, tensors = found.setdefault(storage_id(storage), ([], []))
                names.append(name)
                if all(tensor is not each for each in tensors):
                    tensors.append(tensor)
        return [_Group(tuple(names), tuple(tensors), tensors[0].untyped_storage()) for names, tensors in found.values()]
