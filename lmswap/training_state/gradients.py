"""Gradients that are non-resident between the backward that computes them and the update that reads them.

A backward runs in parts; between two of them autograd accumulates the gradients of the first::

    compute     part 1        part 2                  part 3
    copied in   earlier of 1  earlier of 2            earlier of 3      to be added to, if there are any
    copied out                gradients of 1          gradients of 2

No code of the caller runs within a part, so that it finds each gradient in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lmswap.ir.backward_parts import part_bytes
from lmswap.runtime.host_copies import Fetched, HostCopies, is_held_elsewhere
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.autograd import queue_callback
from lmswap.torch_compat.tensors import storage_id
from lmswap.training_state import NamedTensors

_NUM_OWNERS = 2  # of a gradient, in C++: its parameter and its Python object


class StreamedGradients:
    """The gradients of one model's parameters, which stay on the device until `stream` is called."""

    def __init__(self, parameters: NamedTensors, host_copies: HostCopies, *, min_bytes: int) -> None:
        """Gradients whose storages have ``min_bytes`` stream."""
        self._parameters, self._host_copies, self._min_bytes = parameters, host_copies, min_bytes
        # By `id` of the parameter, as one may have several names: resident, with host copies that are kept for them.
        self._fetched: dict[int, Fetched] = {}
        self._spares: dict[int, torch.UntypedStorage] = {}  # likewise: whose host copies later gradients take over
        self.are_streamed = False
        self.added_bytes = 0  # that the last backward has copied in, to add to them

    def stream(self) -> None:
        """Move gradients to host copies from now on."""
        self.are_streamed = True
        self._move_out(self._parameters().values())

    def restore(self) -> None:
        """Make all of them resident, and keep later ones on the device.

        Raises:
            TransferError: a copy failed.
        """
        self.are_streamed = False
        self._settle()
        self._spares.clear()
        for parameter in self._parameters().values():
            if (gradient := self._gradient(parameter)) is not None:
                self._host_copies.move_in(gradient.untyped_storage())

    def of_backward(self, parts: Sequence[Sequence[str]]) -> BackwardGradients:
        """Return what streams the gradients of a backward that begins.

        Args:
            parts: by part of the backward, the names of the parameters whose gradients it completes.
        """
        self._settle()
        self.added_bytes = 0
        return BackwardGradients(self, self._parameters(), parts)

    def end_backward(self) -> None:
        """Move out the last gradients."""
        self._move_out(self._parameters().values())

    def start_leaving(self, parameters: Iterable[Tensor]) -> list[int]:
        """Start to copy out the gradients of ``parameters`` that are resident; return the ids, for `finish`."""
        leaving: list[int] = []
        for number, parameter in _by_id(parameters).items():
            gradient = self._gradient(parameter)
            if gradient is None or self._host_copies.find(storage := gradient.untyped_storage()) is not None:
                continue
            if is_held_elsewhere(storage, [gradient], num_owners=_NUM_OWNERS):  # as buckets of all-reduces hold it
                continue
            known = self._fetched.get(number)
            if known is None or storage_id(known.storage) != storage_id(storage):
                self._fetched[number] = self._host_copies.prepare_move_out(storage, self._spares.pop(number, None))
            self._host_copies.start_move(self._fetched[number])
            leaving.append(number)
        return leaving

    def start_coming(self, parameters: Iterable[Tensor]) -> list[int]:
        """Start to copy in the gradients of ``parameters`` that are non-resident; return the ids, for `finish`."""
        coming: list[int] = []
        for number, parameter in _by_id(parameters).items():
            gradient = self._gradient(parameter)
            if gradient is None:
                continue
            if (fetched := self._host_copies.prepare_fetch(gradient.untyped_storage())) is not None:
                self._fetched[number] = fetched
                self._host_copies.start_move(fetched)
                self.added_bytes += fetched.storage.nbytes()
                coming.append(number)
        return coming

    def finish(self, leaving: Iterable[int], coming: Iterable[int] = ()) -> None:
        """Make the current stream wait for copies that were started.

        Raises:
            TransferError: a copy failed; that gradient stays where it was.
        """
        for number in coming:
            self._host_copies.finish_move(self._fetched[number])
        for number in leaving:
            fetched = self._fetched[number]
            self._host_copies.finish_move(fetched)
            self._spares[number] = fetched.storage
            del self._fetched[number]

    def _move_out(self, parameters: Iterable[Tensor]) -> None:
        self.finish(self.start_leaving(parameters))

    def _settle(self) -> None:
        """Make what an interrupted backward has left resident non-resident, or forget it if it was dropped."""
        for number, fetched in [*self._fetched.items()]:
            self._host_copies.settle(fetched)
            del self._fetched[number]

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """Return its gradient, if that can stream."""
        gradient = parameter.grad
        if gradient is None or not has_plain_storage(gradient) or gradient.device != self._host_copies.device:
            return None
        return gradient if gradient.untyped_storage().nbytes() >= self._min_bytes else None


class BackwardGradients:
    """The gradients of one backward."""

    def __init__(
        self, gradients: StreamedGradients, parameters: Mapping[str, Tensor], parts: Sequence[Sequence[str]]
    ) -> None:
        self._gradients, self._parameters, self._parts = gradients, parameters, iter(parts)
        self._computed: list[Tensor] = []  # parameters whose gradients the part before has completed
        queue_callback(gradients.end_backward)

    @contextmanager
    def around_part(self) -> Iterator[None]:
        """Copy gradients while the next part runs: out those of the part before, in those that it adds to."""
        leaving = self._gradients.start_leaving(self._computed)
        self._computed = [self._parameters[name] for name in next(self._parts) if name in self._parameters]
        coming = self._gradients.start_coming(self._computed)
        yield
        self._gradients.finish(leaving, coming)


def window_bytes(sizes: Sequence[int], host_copies: HostCopies) -> int:
    """Return what streaming gradients of these bytes takes of device memory outside of a step.

    On a GPU of three parts of a backward: those copied out, those computed and those that these are added to. On a CPU
    these are a part of the step, and the caller maps pages of all that it reads in place, as clipping by their norm
    does.
    """
    if host_copies.device.type == "cpu":
        return host_copies.mapped_bytes(sum(sizes))
    return 3 * (part_bytes(sum(sizes)) + max(sizes)) if sizes else 0


def _by_id(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    return {id(tensor): tensor for tensor in tensors}
