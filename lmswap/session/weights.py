"""The weights that plans place: parameters of a model that are resident on the device, or in their host copies.

A plan decides for each weight that its step reads. One that it moves is non-resident outside of steps; the step fetches
it from there. Trained parameters are not placed: they stay resident, where optimizers update them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.runtime.host_copies import HostCopies
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.tensors import storage_id, storage_use_count, tensor_use_count

# Returns the parameters that a model has now, by all of their names: a caller may replace them.
Parameters = Callable[[], Mapping[str, nn.Parameter]]

# Of a storage's owners in C++: the Python object by which it is examined.
_OWN_USE = 1


@dataclass(frozen=True)
class _Group:
    """The parameters that share one storage, which is placed as one."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    storage: torch.UntypedStorage

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether something beside these parameters owns the storage, or one of them: it may have the address.

        A numpy array does, and what DLPack exports. Memory that processes or files share has its own place, too.
        """
        is_owned = storage_use_count(storage_id(self.storage)) > len(self.parameters) + _OWN_USE
        is_shared = self.storage.device.type == "cpu" and self.storage.is_shared()
        return is_owned or is_shared or any(tensor_use_count(parameter) > 1 for parameter in self.parameters)


class Weights:
    """The parameters of one model as weights that plans place, by their names."""

    def __init__(
        self,
        parameters: Parameters,
        host_copies: HostCopies,
        *,
        min_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        """``parameters`` whose storages have ``min_bytes`` can be placed once `manage` is called; ``note`` reports."""
        self._parameters = parameters
        self._host_copies, self._min_bytes, self._note = host_copies, min_bytes, note
        self._trained: frozenset[str] = frozenset()  # that a graph has differentiated
        self._kept: dict[str, int] = {}  # resident ones that plans count, by the first name: their bytes
        self.is_managed = False

    def manage(self) -> int:
        """Let plans place weights from now on; until there are plans, all are non-resident.

        On a CPU resident ones move to memory of the heap that counts them, unless something beside the model holds
        theirs.

        Returns:
            The bytes of all parameters, which count from now on.

        Raises:
            TierError: the tier has no room.
        """
        self.is_managed = True
        plain = filter(has_plain_storage, self._parameters().values())
        storages = {storage_id(s): s for s in (parameter.untyped_storage() for parameter in plain)}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        del storages
        for name, parameter in self._parameters().items():
            nbytes_as_dense = parameter.numel() * parameter.element_size()
            if nbytes_as_dense >= self._min_bytes and not has_plain_storage(parameter):
                what = f"'{name}' ({format_bytes(nbytes_as_dense)})"
                self._note(f"{what} is not swapped: it is a {type(parameter).__name__} without plain bytes")
        self.place(())
        for group in self._groups():
            is_resident = self._host_copies.find(group.storage) is None
            if group.storage.device.type == "cpu" and is_resident and not group.is_held_elsewhere:
                self._host_copies.move_to_heap(group.storage)
        return nbytes

    def load(self) -> None:
        """Move parameters that can be placed from the CPU to host copies of the device; the CPU's memory is freed.

        Raises:
            TierError: the tier has no room.
        """
        groups = self._groups(torch.device("cpu"))
        while groups:  # each is freed when it has been copied
            group = groups.pop()
            storage = self._host_copies.receive(group.storage)
            for parameter in group.parameters:
                offset, shape, stride = parameter.storage_offset(), parameter.shape, parameter.stride()
                made = torch.empty(0, dtype=parameter.dtype, device=storage.device)
                parameter.data = made.set_(storage, offset, shape, stride)

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

    def placeable(self) -> dict[str, int]:
        """Return the names of the weights that a plan may place now, with their bytes at one name of each storage."""
        found: dict[str, int] = {}
        for group in self._groups() if self.is_managed else ():
            nbytes = group.storage.nbytes()
            if self._trained.isdisjoint(group.names):
                if group.is_held_elsewhere:
                    self._note(
                        f"'{group.names[0]}' ({format_bytes(nbytes)}) is not swapped: something beside the model holds "
                        "its memory, as a numpy array, a detached tensor or a view of it does"
                    )
                    continue
                found |= dict.fromkeys(group.names, 0) | {group.names[0]: nbytes}
        return found

    def names(self) -> dict[int, str]:
        """Return the first name of each parameter of the model, by `id`."""
        return {id(parameter): name for name, parameter in reversed([*self._parameters().items()])}

    def note_trained(self, names: Collection[str]) -> bool:
        """Place parameters of these ``names`` no more, as a graph differentiates them; whether any was placeable."""
        newly = frozenset(names) - self._trained
        self._trained |= newly
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
            is_trained, is_moved = (not names.isdisjoint(group.names) for names in (self._trained, moved))
            is_kept = not (kept.isdisjoint(group.names) or is_trained or is_moved)
            if (is_trained or is_kept) is not is_resident and not group.is_held_elsewhere:
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

    def resident_bytes(self, names: Mapping[str, int]) -> int:
        """Bytes of those of ``names``, as `placeable` returns them, that are resident now."""
        return sum(
            group.storage.nbytes()
            for group in self._groups()
            if group.names[0] in names and self._host_copies.find(group.storage) is None
        )

    def _groups(self, lies_on: torch.device | None = None) -> list[_Group]:
        """Return the parameters with plain memory that are large enough, by storage; by default those on the device."""
        lies_on = lies_on or self._host_copies.device
        found: dict[int, tuple[list[str], list[nn.Parameter]]] = {}
        for name, parameter in self._parameters().items():
            if not has_plain_storage(parameter):
                continue
            storage = parameter.untyped_storage()
            if storage.nbytes() >= self._min_bytes and parameter.device == lies_on:
                names, parameters = found.setdefault(storage_id(storage), ([], []))
                names.append(name)
                if all(parameter is not each for each in parameters):
                    parameters.append(parameter)
        return [_Group(tuple(n), tuple(p), p[0].untyped_storage()) for n, p in found.values()]
