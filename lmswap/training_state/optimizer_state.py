"""Updates in chunks: an optimizer's state, parameters and gradients may be non-resident between updates.

An update runs the optimizer's own step on consecutive parts of its parameters. While one runs, that of the last one is
copied out, and what is non-resident of the next ones in, as far ahead as the room for the largest three allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmswap.errors import TransferError
from lmswap.hardware.memory import DeviceMemory
from lmswap.runtime.host_copies import Fetched, HostCopies, is_held_elsewhere
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.optimizers import is_torchs_own, loaded_value, replace_update
from lmswap.torch_compat.tensors import storage_id, version_of
from lmswap.training_state.gradients import StreamedGradients
from lmswap.training_state.optimizer_memory import is_foreach, state_sizes, state_tensors, temporary_bytes
from lmswap.training_state.optimizer_trial import temporary_values

# The bytes of one chunk: at most this share of the budget, and this one of all that is copied, as an update waits for
# the first chunk and the last; within limits, as small copies and kernels take longer.
_SHARE_OF_BUDGET, _SHARE_OF_ALL, _MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1 / 64, 1 / 32, 2**20, 2**28


@dataclass(frozen=True)
class _Deferred:
    """A tensor of a saved state that is still to be loaded."""

    tensor: Tensor


class ChunkedUpdates:
    """The updates of one optimizer, which run as torch's while nothing that they read is non-resident.

    They are replaced from the beginning: a trainer may keep the optimizer's step, or call the model within it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        host_copies: HostCopies,
        gradients: StreamedGradients,
        *,
        min_bytes: int,
        budget_bytes: int,
        memory: DeviceMemory,
        make_room: Callable[[], None],
    ) -> None:
        """Tensors of ``min_bytes`` stream; ``gradients`` are those of the parameters, ``memory`` that of their device.

        Updates of its parameters in parts must have the bits of whole ones. ``make_room`` is called after each of them:
        the caller may access host copies in place.
        """
        self.optimizer, self._host_copies, self._min_bytes = optimizer, host_copies, min_bytes
        self._memory, self._make_room = memory, make_room
        self._min_state_bytes = min_bytes
        self._gradients = gradients
        self._temporary_values = temporary_values(optimizer)
        self._max_chunk_bytes = min(max(int(_SHARE_OF_BUDGET * budget_bytes), _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
        self._fetched: dict[int, Fetched] = {}  # by storage, until its copy out has ended
        self._versions: dict[int, tuple[Tensor, int]] = {}  # gradients and their version counters, by storage
        self._streamed: set[int] = set()
        self._moves_parameters = False
        self._undo: list[Callable[[], None]] = [
            replace_update(self.optimizer, self._update),
            self.optimizer.register_load_state_dict_pre_hook(self._defer_loading).remove,
            self.optimizer.register_load_state_dict_post_hook(self._load_deferred, prepend=True).remove,
        ]

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return bool(self._undo)

    @property
    def streamed(self) -> frozenset[int]:
        """The parameters whose state streams, by `id`."""
        return frozenset(self._streamed)

    @property
    def run_in_chunks(self) -> bool:
        """Whether updates may run in chunks, for which each fetches what is non-resident."""
        return bool(self.streamed) or self._moves_parameters or self._gradients.are_streamed

    @property
    def limits_temporaries(self) -> bool:
        """Whether updates run in chunks although all is resident: foreach ones take temporaries of all they update."""
        return self._moves_parameters and any(map(is_foreach, self.optimizer.param_groups))

    @property
    def may_write_gradients(self) -> bool:
        """Whether updates may write gradients, which versions do not show (torch 2.13).

        Fused and foreach ones do: the division by a GradScaler's scale, and Nesterov's momentum on a GPU.
        """
        is_loop = not any(group.get("fused") or is_foreach(group) for group in self.optimizer.param_groups)
        return not (is_loop and is_torchs_own(self.optimizer))

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the part of the state that streams."""
        streamed = self.streamed
        return sum(nbytes for parameter, nbytes in state_sizes(self.optimizer).items() if parameter in streamed)

    def gradient_sizes(self) -> list[int]:
        """Return the bytes of each gradient that can stream."""
        sizes = [parameter.nbytes for parameter in self._parameters() if parameter.requires_grad]
        return [nbytes for nbytes in sizes if nbytes >= self._min_bytes]

    @property
    def state_bytes(self) -> int:
        """Bytes of all state; of what does not exist yet, as expected."""
        return sum(state_sizes(self.optimizer).values())

    def window_bytes(self, *, streams: bool = False, streams_gradients: bool = False) -> int:
        """Return what an update takes beside what is resident.

        Of three chunks, one being copied out, one updated and one copied in, and of its temporaries. If all is
        resident, those of the whole on a CPU; on a GPU 0, where they are reserved before the first update.

        Args:
            streams: as if state streamed.
            streams_gradients: as if gradients did.
        """
        streams_gradients |= self._gradients.are_streamed
        if not (streams or streams_gradients or self._needs_chunks()):
            return self.whole_bytes
        sizes, groups = self._copied_bytes(streams_gradients=streams_gradients), self.optimizer.param_groups
        chunks = [*self._chunks([group["params"] for group in groups], sizes)]
        window_bytes = _window_bytes([_sum_of(sizes, chunk) for chunk in chunks])
        return window_bytes + max(map(self._temporary_bytes, chunks), default=0)

    @property
    def whole_bytes(self) -> int:
        """What an update takes if all is resident, see `window_bytes`."""
        if self._host_copies.device.type != "cpu":
            return 0
        return self._temporary_bytes([group["params"] for group in self.optimizer.param_groups])

    def stream(self, nbytes: int) -> None:
        """Make ``nbytes`` of it non-resident, that of the first parameters, and let updates stream it from now on.

        Raises:
            TierError: the tier has no room.
        """
        count = 0
        for size in state_sizes(self.optimizer).values():
            if nbytes <= 0:
                break
            count, nbytes = count + 1, nbytes - size
        self.stream_first(count)

    def stream_first(self, count: int) -> None:
        """Make the state of the first ``count`` parameters non-resident, see `stream`."""
        self._streamed.update(map(id, islice(self._parameters(), count)))
        self._move_out(self._parameters())

    def fetch_parameters(self) -> None:
        """Let updates fetch non-resident parameters from now on."""
        self._moves_parameters = True

    def restore(self) -> int:
        """Make all state resident, and let updates run as torch's; return the bytes that something else holds.

        Raises:
            TransferError: a copy failed.
        """
        self._settle()
        streaming = self._state_storages(self._parameters())
        self.close()
        left_bytes = 0
        for storage, tensors in streaming:
            if not is_held_elsewhere(storage, tensors):
                self._host_copies.move_in(storage)
            elif self._host_copies.find(storage) is not None:
                left_bytes += storage.nbytes()
        return left_bytes

    def close(self) -> None:
        """Let updates run as torch's from now on, on state where it is; idempotent."""
        while self._undo:
            self._undo.pop()()
        self._streamed.clear()
        self._moves_parameters = False

    def _update(self, run: Callable[[], None]) -> None:
        """Call ``run`` for each chunk of the parameters, which is resident then."""
        if not self._needs_chunks():
            run()
            return
        groups = self.optimizer.param_groups
        updated = [group["params"] for group in groups]
        copied_bytes = self._copied_bytes(streams_gradients=self._gradients.are_streamed)
        copied_bytes |= {id(parameter): 0 for parameter in chain.from_iterable(updated) if parameter.grad is None}
        chunks = list(self._chunks(updated, copied_bytes)) or [updated]
        sizes = [_sum_of(copied_bytes, chunk) for chunk in chunks]
        self._settle()
        try:
            window_bytes, num_started = _window_bytes(sizes), 0
            coming, leaving = deque[list[int]](), list[int]()  # storages
            last_use: dict[int, int] = {}  # of each: the last chunk that reads it, of those whose fetches were started
            for index, chunk in enumerate(chunks):
                while num_started < len(chunks) and sum(sizes[max(0, index - 1) : num_started + 1]) <= window_bytes:
                    coming.append(self._start_fetch(chunks[num_started]))
                    last_use |= dict.fromkeys(coming[-1], num_started)
                    num_started += 1
                here = coming.popleft()
                for number in here:
                    if not self._fetched[number].is_resident:  # as it is for an earlier chunk
                        self._host_copies.finish_move(self._fetched[number])
                parts = [{**group, "params": each} for group, each in zip(groups, chunk, strict=True)]
                self.optimizer.param_groups = parts
                run()
                for group, part in zip(groups, parts, strict=True):  # which an update may have changed
                    group.update({**part, "params": group["params"]})
                left, leaving = leaving, self._drop_unchanged([each for each in here if last_use[each] == index])
                for number in leaving:
                    self._host_copies.start_move(self._fetched[number])
                self._finish(each for each in left if last_use[each] < index)  # before memory is taken for others
                self._move_out(parameter for parameters in chunk for parameter in parameters)
            self._finish(leaving)
        finally:
            self.optimizer.param_groups = groups  # one instruction, before which no handler of a signal runs
            self._versions.clear()
            self._settle()
        self._make_room()

    def _needs_chunks(self) -> bool:
        """Whether an update reads what is non-resident, or may only have the temporaries of a part."""
        if self.streamed or self._gradients.are_streamed or self.limits_temporaries:
            return True
        if not self._moves_parameters or not self._host_copies:  # a look for each takes as long as a small update
            return False
        own = (each.untyped_storage() for each in self._parameters() if has_plain_storage(each))
        return any(self._host_copies.find(each) is not None for each in own)

    def _defer_loading(self, _: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return ``saved`` with its state wrapped: torch would put it into device memory beside what is there."""
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        state = dict(saved["state"])
        for number, parameter in zip(numbers, self._parameters(), strict=False):  # torch compares the groups
            if has_plain_storage(parameter) and number in state:
                state[number] = {
                    key: _Deferred(value)
                    if isinstance(value, Tensor) and value.ndim and value.nbytes >= self._min_bytes
                    else value
                    for key, value in state[number].items()
                }
        return {**saved, "state": state}

    def _load_deferred(self, _: Optimizer) -> None:
        states: dict[Tensor, dict[Any, Any]] = self.optimizer.state
        sizes = {
            id(parameter): sum(value.tensor.nbytes for value in values.values() if isinstance(value, _Deferred))
            for parameter, values in states.items()
        }
        chunks = [chunk for (chunk,) in self._chunks([[each for each in self._parameters() if each in states]], sizes)]
        try:
            for chunk in chunks:
                _load(states, chunk)
                self._move_out(chunk)
        finally:  # an interrupt leaves nothing that is no state
            _load(states, chain.from_iterable(chunks))
            self._memory.trim()  # of what has been loaded: it may be more than steps ever take

    def _copied_bytes(self, *, streams_gradients: bool) -> dict[int, int]:
        """Return what an update may copy in of each parameter, by `id`: its state, itself and its gradient."""
        sizes = state_sizes(self.optimizer)
        num_copied = self._moves_parameters + streams_gradients
        for parameter in self._parameters() if num_copied else ():
            sizes[id(parameter)] += num_copied * parameter.nbytes * (parameter.nbytes >= self._min_bytes)
        return sizes

    def _chunks(self, groups: Sequence[Sequence[Tensor]], sizes: Mapping[int, int]) -> Iterator[list[list[Tensor]]]:
        """Yield consecutive parts of the parameters of ``groups``, by group; ``sizes`` are what is copied, by `id`."""
        max_bytes = min(self._max_chunk_bytes, max(int(_SHARE_OF_ALL * sum(sizes.values())), _MIN_CHUNK_BYTES))
        copied_bytes = other_bytes = 0
        chunk: list[list[Tensor]] = [[] for _ in groups]
        for number, parameters in enumerate(groups):
            for parameter in parameters:
                # Small tensors are not copied: a chunk of them would leave nothing to do beside the copies of others.
                nbytes, is_copied = sizes[id(parameter)], parameter.nbytes >= self._min_bytes
                before_bytes = copied_bytes if is_copied else other_bytes
                if before_bytes and before_bytes + nbytes > max_bytes:
                    yield chunk
                    chunk, copied_bytes, other_bytes = [[] for _ in groups], 0, 0
                chunk[number].append(parameter)
                copied_bytes += nbytes * is_copied
                other_bytes += nbytes * (not is_copied)
        if any(chunk):
            yield chunk

    def _temporary_bytes(self, chunk: Sequence[Sequence[Tensor]]) -> int:
        return temporary_bytes(self.optimizer.param_groups, chunk, self._temporary_values)

    def _start_fetch(self, chunk: Sequence[Sequence[Tensor]]) -> list[int]:
        """Start to fetch what an update of ``chunk`` reads, unless an earlier one does; return the ids of all storages.

        Of parameters without gradients it reads little, where that is.
        """
        read: list[int] = []
        parameters = [parameter for part in chunk for parameter in part if parameter.grad is not None]
        gradients = [each.grad for each in parameters if each.grad is not None and has_plain_storage(each.grad)]
        tensors = (*(each for each in parameters if has_plain_storage(each)), *gradients)
        for gradient in gradients:
            self._versions.setdefault(storage_id(gradient.untyped_storage()), (gradient, version_of(gradient)))
        storages = {storage_id(each.untyped_storage()): each.untyped_storage() for each in tensors}  # shared ones once
        for storage in (*storages.values(), *(storage for storage, _ in self._state_storages(parameters))):
            number = storage_id(storage)
            if number not in self._fetched and (fetched := self._host_copies.prepare_fetch(storage)) is not None:
                self._fetched[number] = fetched  # its memory lives on if this is interrupted
                self._host_copies.start_move(fetched)
            if number in self._fetched:
                read.append(number)
        return read

    def _drop_unchanged(self, updated: Sequence[int]) -> list[int]:
        """Return ``updated`` without the gradients that torch's own update has only read; their copies are dropped."""
        for number in () if self.may_write_gradients else updated:
            gradient, version = self._versions.get(number, (None, 0))
            if gradient is not None and version_of(gradient) == version:
                self._host_copies.drop_fetched(self._fetched[number])
                del self._fetched[number]
        return [number for number in updated if number in self._fetched]

    def _finish(self, leaving: Iterable[int]) -> None:
        for number in leaving:
            self._host_copies.finish_move(self._fetched[number])
            del self._fetched[number]

    def _settle(self) -> None:
        """Make what an interrupted update has left in device memory non-resident.

        Raises:
            TransferError: a copy out failed, which was tried again: what it copies stays in device memory.
        """
        failed: TransferError | None = None
        for number, fetched in [*self._fetched.items()]:
            try:
                self._host_copies.settle(fetched)
            except TransferError as error:
                failed = error
            del self._fetched[number]
        if failed is not None:
            raise failed

    def _move_out(self, parameters: Iterable[Tensor]) -> None:
        """Make the state of ``parameters`` non-resident that torch has just made, a chunk at a time."""
        leaving: list[torch.UntypedStorage] = []
        for storage, tensors in self._state_storages(parameters):
            is_resident = storage_id(storage) not in self._fetched and self._host_copies.find(storage) is None
            if is_resident and not is_held_elsewhere(storage, tensors):
                leaving.append(storage)
        if leaving:
            self._host_copies.move_out(leaving)

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _state_storages(self, parameters: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, list[Tensor]]]:
        """Return the storages of the state of ``parameters`` that streams, with their tensors."""
        found: dict[int, tuple[torch.UntypedStorage, list[Tensor]]] = {}
        streamed = self.streamed
        for parameter in (each for each in parameters if id(each) in streamed):
            for tensor in state_tensors(self.optimizer, parameter):
                if not has_plain_storage(tensor) or tensor.device != self._host_copies.device:
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self._min_state_bytes:
                    found.setdefault(storage_id(storage), (storage, []))[1].append(tensor)
        return list(found.values())


def _sum_of(sizes: Mapping[int, int], chunk: Sequence[Sequence[Tensor]]) -> int:
    return sum(sizes[id(parameter)] for part in chunk for parameter in part)


def _window_bytes(sizes: Sequence[int]) -> int:
    """Return what chunks of ``sizes`` take at most while one is copied out, one updated and one copied in."""
    return max(map(sum, zip(sizes, [*sizes[1:], 0], [*sizes[2:], 0, 0], strict=False)), default=0)


def _load(states: Mapping[Tensor, dict[Any, Any]], parameters: Iterable[Tensor]) -> None:
    """Put what is deferred of ``states`` of ``parameters`` where torch puts state."""
    for parameter in parameters:
        for key, value in states[parameter].items():
            if isinstance(value, _Deferred):
                states[parameter][key] = loaded_value(parameter, value.tensor, key)


def updated_parameters(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """Return the parameters that ``optimizers`` update, by `id`."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return frozenset(id(parameter) for group in groups for parameter in group["params"])
