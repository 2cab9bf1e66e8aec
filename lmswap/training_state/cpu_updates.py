"""Updates on the CPU of a model on a GPU: of parameters and gradients in host copies, with state that stays there.

An update runs the optimizer's own step on consecutive parts of its parameters. While the CPU updates one, what is
resident of the next is copied out, and what was of the last one in. Its bits are those of the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lmswap.errors import OptionError, TransferError
from lmswap.runtime.host_copies import Fetched, HostCopies
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.optimizers import is_torchs_own
from lmswap.torch_compat.tensors import storage_id
from lmswap.training_state.cpu_update_trial import cpu_state_keys, seconds_on_cpu
from lmswap.training_state.gradients import StreamedGradients
from lmswap.training_state.optimizer_state import ChunkedUpdates
from lmswap.training_state.optimizer_trial import settings_on

_CPU = torch.device("cpu")
# What a GradScaler gives fused updates, which would read it on the CPU before its copy has ended (torch 2.13, no
# upstream issue known).
_SCALING = ("grad_scale", "found_inf")
_State = dict[Any, Any]  # of one parameter
_Use = tuple[int, object]  # of a storage: the `id` of a parameter, and which of its tensors lies there
_Storages = dict[int, tuple[torch.UntypedStorage, _Use]]  # by `storage_id`


class _Moved(NamedTuple):
    """A storage that an update moves to a host copy and back."""

    fetched: Fetched
    use: _Use  # under which its host copy is kept


class _Twin(NamedTuple):
    """A parameter and its state, and the tensors on the CPU that the update gets instead."""

    parameter: Tensor
    on_cpu: Tensor
    state: _State
    state_on_cpu: _State


class CpuUpdates(ChunkedUpdates):
    """The updates of one optimizer on the CPU; all of its state is in host copies from the beginning."""

    def __init__(
        self, optimizer: Optimizer, host_copies: HostCopies, gradients: StreamedGradients, **given: Any
    ) -> None:
        """See `ChunkedUpdates`, also for what else is ``given``. Updates of copies are timed."""
        self._cpu_state_keys = cpu_state_keys(optimizer, host_copies.device)
        self.predicted_seconds = seconds_on_cpu(optimizer)  # of an update, without copies
        self.measured_seconds: float | None = None  # of the last one
        self._moved: dict[int, _Moved] = {}  # by storage
        self._spares: dict[_Use, torch.UntypedStorage] = {}  # whose host copies later updates take over
        super().__init__(optimizer, host_copies, gradients, **given)
        self._min_state_bytes = 1

    @property
    def streamed(self) -> frozenset[int]:
        """The parameters whose state is non-resident, by `id`: all."""
        return frozenset(map(id, self._parameters())) if self.is_open else frozenset()

    @property
    def limits_temporaries(self) -> bool:
        """See `ChunkedUpdates`; an update has none on the device."""
        return False

    def window_bytes(self, *, streams: bool = False, streams_gradients: bool = False) -> int:
        """See `ChunkedUpdates`; an update takes nothing of the device."""
        return 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self._parameters())

    def copied_bytes(self) -> int:
        """Return what an update copies out, and in: resident parameters, and gradients unless these stream."""
        nbytes = 0
        for parameter in (each for each in self._parameters() if each.requires_grad):
            is_resident = self._host_copies.find(parameter.untyped_storage()) is None
            streams_gradient = self._gradients.are_streamed and parameter.nbytes >= self._min_bytes
            nbytes += (is_resident + (not streams_gradient)) * parameter.nbytes
        return nbytes

    def close(self) -> None:
        """Let updates run as torch's from now on, on state where it is; idempotent."""
        super().close()
        self._spares.clear()

    def _update(self, run: Callable[[], None]) -> None:
        """Call ``run`` for each chunk of the parameters, which is in host memory then."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._move_out(self._parameters())  # state that the caller has assigned
        skips = is_torchs_own(self.optimizer)  # what has no gradient
        updated = [[p for p in group["params"] if p.grad is not None or not skips] for group in groups]
        chunks = list(self._chunks(updated, {id(p): 2 * p.nbytes for p in self._parameters()})) or [updated]
        storages = [self._device_storages(chain.from_iterable(chunk)) for chunk in chunks]
        last_chunks = {number: index for index, found in enumerate(storages) for number in found}
        self.measured_seconds, began = None, 0.0
        scaling = {name: getattr(self.optimizer, name) for name in _SCALING if hasattr(self.optimizer, name)}
        try:
            for name, value in scaling.items():
                setattr(self.optimizer, name, value.cpu() if isinstance(value, Tensor) else value)
            self._start_out(storages[0])
            for index, chunk in enumerate(chunks):
                self._finish_out(storages[index])
                began = began or perf_counter()
                if index + 1 < len(chunks):
                    self._start_out(storages[index + 1])
                self._run_on_cpu(run, groups, chunk)
                self._start_in(number for number in storages[index] if last_chunks[number] == index)
            self._finish_in()
            self.measured_seconds = perf_counter() - began
        finally:
            self.optimizer.param_groups, self.optimizer.state = groups, state
            for name, value in scaling.items():
                setattr(self.optimizer, name, value)
            self._settle()

    def _run_on_cpu(
        self, run: Callable[[], None], groups: Sequence[dict[str, Any]], chunk: Sequence[Sequence[Tensor]]
    ) -> None:
        state = self.optimizer.state
        twins = [[self._twin(parameter, state) for parameter in parameters] for parameters in chunk]
        all_twins = list(chain.from_iterable(twins))
        state_on_cpu: defaultdict[Any, Any] = defaultdict(dict, _without_parameters(state))
        state_on_cpu.update({twin.on_cpu: dict(twin.state_on_cpu) for twin in all_twins if twin.parameter in state})
        given = [settings_on(group, _CPU) for group in groups]
        parts = [{**each, "params": [twin.on_cpu for twin in own]} for each, own in zip(given, twins, strict=True)]
        try:
            self.optimizer.param_groups, self.optimizer.state = parts, state_on_cpu
            run()
        finally:
            self.optimizer.param_groups, self.optimizer.state = groups, state  # type: ignore[assignment]
            for group, part, before in zip(groups, parts, given, strict=True):  # which an update may have changed
                changed = {key: value for key, value in part.items() if value is not before.get(key)}
                group.update({**changed, "params": group["params"]})
            state.update(_without_parameters(state_on_cpu))
            for twin in (each for each in all_twins if each.on_cpu in state_on_cpu):
                self._keep_state(twin, state_on_cpu[twin.on_cpu])
            increment_version([twin.parameter for twin in all_twins])  # as updates in place do

    def _twin(self, parameter: Tensor, state: Mapping[Any, _State]) -> _Twin:
        on_cpu = self._on_cpu(parameter.detach())
        if isinstance(parameter, nn.Parameter):
            on_cpu = nn.Parameter(on_cpu, requires_grad=parameter.requires_grad)
        vars(on_cpu).update(vars(parameter))  # marks for optimizers of other packages
        if parameter.grad is not None:
            on_cpu.grad = self._on_cpu(parameter.grad)
        values = state.get(parameter, {})
        return _Twin(parameter, on_cpu, values, {key: self._on_cpu(value) for key, value in values.items()})

    def _on_cpu(self, value: Any) -> Any:
        """Return a tensor of the CPU with the bytes of ``value``, if that is one of the device in a host copy."""
        is_elsewhere = isinstance(value, Tensor) and value.device == self._host_copies.device
        return self._host_copies.on_cpu(value) if is_elsewhere else value

    def _keep_state(self, twin: _Twin, values: _State) -> None:
        """Keep the state that an update has left as ``values``; what is new of it goes to host copies."""
        found: _State = {}
        for key, value in values.items():
            before, before_on_cpu = twin.state.get(key), twin.state_on_cpu.get(key)
            if value is before_on_cpu and value is not before:
                found[key] = before
            elif not isinstance(value, Tensor) or value.device != _CPU or key in self._cpu_state_keys:
                found[key] = value
            elif isinstance(before, Tensor) and before.device != _CPU and _is_alike(before, value):
                twin.state_on_cpu[key].copy_(value)
                found[key] = before
            else:
                found[key] = self._in_host_copy(value)
        kept = self.optimizer.state[twin.parameter]
        kept.update(found)
        for key in kept.keys() - found.keys():
            del kept[key]

    def _in_host_copy(self, value: Tensor) -> Tensor:
        """Return a tensor of the device, in a host copy, with the bytes of ``value``, which is on the CPU."""
        made = torch.empty(0, dtype=value.dtype, device=self._host_copies.device)
        if not value.numel() or not has_plain_storage(value):
            return value.to(made.device)
        storage = self._host_copies.receive(value.untyped_storage())
        return made.set_(storage, value.storage_offset(), value.shape, value.stride())

    def _device_storages(self, parameters: Iterable[Tensor]) -> _Storages:
        """Return the storages on the device that an update of ``parameters`` accesses."""
        found: _Storages = {}
        for parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            for use, tensor in (("", parameter), (".grad", parameter.grad), *state.items()):
                if not isinstance(tensor, Tensor) or tensor.device == _CPU:
                    continue
                if not has_plain_storage(tensor) or tensor.device != self._host_copies.device:
                    raise OptionError(
                        f"optimizer_device='cpu': {type(self.optimizer).__name__} has a tensor of shape "
                        f"{tuple(tensor.shape)} that is a {type(tensor).__name__} on {tensor.device}, and only plain "
                        f"tensors on {self._host_copies.device} or the CPU can be updated there: leave it out"
                    )
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found.setdefault(storage_id(storage), (storage, (id(parameter), use)))
        return found

    def _start_out(self, storages: _Storages) -> None:
        for number, (storage, use) in storages.items():
            if number not in self._moved and self._host_copies.find(storage) is None:
                fetched = self._host_copies.prepare_move_out(storage, self._spares.pop(use, None))
                self._moved[number] = _Moved(fetched, use)
                self._host_copies.start_move(fetched)

    def _finish_out(self, storages: _Storages) -> None:
        """Wait until the CPU may access ``storages``, also for what the GPU writes to host copies in place."""
        for moved in (self._moved[number] for number in storages if number in self._moved):
            if moved.fetched.is_resident:
                self._host_copies.finish_move(moved.fetched)
        self._host_copies.synchronize()

    def _start_in(self, numbers: Iterable[int]) -> None:
        for moved in (self._moved[number] for number in numbers if number in self._moved):
            self._host_copies.start_move(moved.fetched)

    def _finish_in(self) -> None:
        for number, moved in [*self._moved.items()]:
            self._host_copies.finish_move(moved.fetched)
            self._keep_spare(number)

    def _settle(self) -> None:
        """Return to the device what an interrupted update has left in host copies.

        Raises:
            TransferError: a copy failed; what it copies stays in its host copy.
        """
        failed: TransferError | None = None
        for number, moved in [*self._moved.items()]:
            try:
                self._host_copies.settle(moved.fetched, on_device=True)
            except TransferError as error:
                failed = error
                del self._moved[number]
            else:
                self._keep_spare(number)
        if failed is not None:
            raise failed

    def _keep_spare(self, number: int) -> None:
        moved = self._moved[number]
        self._spares[moved.use] = self._host_copies.take_spare(moved.fetched)
        del self._moved[number]


def _without_parameters(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype
