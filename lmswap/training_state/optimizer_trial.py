"""Trials of an optimizer on small copies: whether its update may run on parts of its parameters, and what it takes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmswap.torch_compat.operators import TorchDispatchMode
from lmswap.torch_compat.optimizers import update_of
from lmswap.torch_compat.pytree import tensors
from lmswap.torch_compat.tensors import storage_id

_MAX_PARAMETERS, _MAX_SIZE = 3, 8  # of a group's copies, and of their dimensions
# Of the gradients of each step: what depends on all of them, as clipping by their norm does, may show at one size only.
_SCALES = (1.0, 1e-4, 1e4, 1.0)


def why_updates_are_whole(optimizer: Optimizer, device: torch.device | None = None) -> str | None:
    """Return why updates of ``optimizer`` in parts have other bits than whole ones, or cannot be tried; None if not.

    Small copies of its parameters take some steps with its settings, once whole, once parameter by parameter: on
    ``device``, by default on their own.
    """
    try:
        is_same = all(map(torch.equal, _trained(optimizer, device, _whole), _trained(optimizer, device, _one_by_one)))
    except Exception as error:  # of any package: it needs more than groups to be made, closures, sparse gradients
        return f"small copies of its parameters could not be updated to try it ({type(error).__name__}: {error})"
    if is_same:
        return None
    return "small copies of its parameters, updated one after the other, had other bits than updated at once"


def _whole(optimizer: Optimizer) -> None:
    update_of(optimizer)(optimizer)


def _one_by_one(optimizer: Optimizer) -> None:
    for _ in _each_alone(optimizer):
        _whole(optimizer)


def _each_alone(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield each parameter of ``optimizer`` while it has no other."""
    groups = optimizer.param_groups
    given = [group["params"] for group in groups]
    for number, parameters in enumerate(given):
        for parameter in parameters:
            for other, group in enumerate(groups):
                group["params"] = [parameter] if other == number else []
            yield parameter
    for group, parameters in zip(groups, given, strict=True):
        group["params"] = parameters


def _trained(optimizer: Optimizer, device: torch.device | None, update: Callable[[Optimizer], None]) -> list[Tensor]:
    """Return the parameters and the state of a small copy of ``optimizer`` after some steps by ``update``."""
    copied = trained_copy(optimizer, device, update)
    parameters = [parameter for group in copied.param_groups for parameter in group["params"]]
    state = (value for parameter in parameters for value in copied.state[parameter].values())
    return [*parameters, *(value for value in state if isinstance(value, Tensor))]


def trained_copy(
    optimizer: Optimizer, device: torch.device | None = None, update: Callable[[Optimizer], None] = _whole
) -> Optimizer:
    """Return a small copy of ``optimizer`` after some steps by ``update``, by default where its parameters are."""
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    on_gpus = [each for each in devices | {device or torch.device("cpu")} if each.type == "cuda"]
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(on_gpus):
        torch.manual_seed(0)
        groups = optimizer.param_groups
        copied = copy_with(optimizer, [(group, [*_small_copies(group["params"], device)]) for group in groups], device)
        parameters = [parameter for group in copied.param_groups for parameter in group["params"]]
        for scale in _SCALES:
            for parameter in parameters:
                parameter.grad = (scale * torch.randn(parameter.shape)).to(parameter)
            update(copied)
    return copied


class TemporaryValues(NamedTuple):
    """Values of temporaries that an update takes at most for each one of a parameter.

    ``own`` while it updates that parameter, ``left`` then of the one before, which loops keep in their variables.
    """

    own: float = 0.0
    left: float = 0.0


def temporary_values(optimizer: Optimizer) -> TemporaryValues:
    """Return what updates of ``optimizer`` take, as small copies show.

    Tensors of less than half of a parameter's values do not count: they may be all of a small copy, and little of a
    large one.
    """
    found: list[TemporaryValues] = []

    def update(copied: Optimizer) -> None:
        found.clear()  # earlier ones make state
        for parameter in _each_alone(copied):
            own = _temporary_share(copied, parameter)
            twin = nn.Parameter(parameter.detach().clone())
            twin.grad, copied.state[twin] = parameter.grad, {**copied.state[parameter]}
            group = next(group for group in copied.param_groups if group["params"])
            group["params"] = [parameter, twin]
            found.append(TemporaryValues(own, max(0.0, _temporary_share(copied, parameter) - own)))
            del copied.state[twin]

    trained_copy(optimizer, update=update)
    return TemporaryValues(*map(max, zip(*found, strict=True))) if found else TemporaryValues()


def _temporary_share(optimizer: Optimizer, parameter: Tensor) -> float:
    """Return the temporaries of an update in multiples of ``parameter``, the size of all parameters that have any."""
    with _Allocations(min_numel=max(2, parameter.numel() / 2)) as allocations:
        _whole(optimizer)
    peak_bytes: int = allocations.peak_bytes
    return peak_bytes / max(1, parameter.nbytes)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors of at least ``min_numel`` values that ops make while it is active."""

    def __init__(self, min_numel: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_numel, self._live, self.peak_bytes = min_numel, dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_id(each.untyped_storage()) for each in tensors([args, kwargs])}
        made = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tensors(made) if each.numel() >= self._min_numel):
            number = storage_id(storage)
            if number not in given and number not in self._live:
                self._live[number] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, number)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return made


def copy_with(
    optimizer: Optimizer,
    groups: Iterable[tuple[Mapping[str, Any], list[nn.Parameter]]],
    device: torch.device | None = None,
) -> Optimizer:
    """Return an optimizer of the class of ``optimizer`` with ``groups`` of settings and parameters, on ``device``."""
    kind: Callable[..., Optimizer] = type(optimizer)
    return kind([{**settings_on(group, device), "params": parameters} for group, parameters in groups])


def settings_on(group: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Return the settings of ``group`` without names; those that are tensors on ``device``, if that is given."""
    return {
        name: value.to(device) if device is not None and isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "param_names"
    }


def _small_copies(parameters: Sequence[Tensor], device: torch.device | None = None) -> Iterator[nn.Parameter]:
    for parameter in parameters[:_MAX_PARAMETERS]:
        values = torch.randn([min(size, _MAX_SIZE) for size in parameter.shape])
        yield nn.Parameter(values.to(device or parameter.device, parameter.dtype))
