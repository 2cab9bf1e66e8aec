"""Trials of updates on the CPU, on copies of an optimizer's parameters: whether they run there, and how long."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmswap.errors import OptionError
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.optimizers import update_of
from lmswap.training_state.optimizer_trial import copy_with, trained_copy, why_updates_are_whole

_CPU = torch.device("cpu")
# Of large copies that are timed: with gradients and Adam's state 64 MiB, which do not stay in caches.
_MAX_VALUES = 2**22
_SMALL_SIZE = 8  # of the dimensions of small ones
_UNTIMED, _TIMED = 2, 2  # updates; the first ones make the state


def check_updates_on_cpu(requested: object, optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Raise OptionError if the ``requested`` device of updates is not the CPU, or ``optimizers`` cannot run there.

    Args:
        requested: the argument ``optimizer_device``.
        optimizers: of the model.
        device: of the model.
    """
    if requested != "cpu":
        raise OptionError(f"optimizer_device must be 'cpu', or left out for the model's device, not {requested!r}")
    if not optimizers:
        raise OptionError("optimizer_device='cpu' needs optimizer=..., whose updates run there")
    if device.type == "cpu":
        raise OptionError("optimizer_device='cpu' is for a model on a GPU; here updates run on the CPU: leave it out")
    for optimizer in optimizers:
        if (why := _why_not_on_cpu(optimizer)) is not None:
            name = type(optimizer).__name__
            raise OptionError(f"optimizer_device='cpu': {name} cannot run there: {why}; leave it out")


def _why_not_on_cpu(optimizer: Optimizer) -> str | None:
    """Return why updates of ``optimizer`` cannot run on the CPU, in parts; None if they can."""
    if (why := why_updates_are_whole(optimizer, _CPU)) is not None:
        return why
    found = [("parameter", each) for group in optimizer.param_groups for each in group["params"]]
    for values in trained_copy(optimizer, _CPU).state.values():
        found += [(f"state '{name}'", value) for name, value in values.items()]
    for name, value in found:
        if isinstance(value, Tensor) and not has_plain_storage(value):
            return f"a {name} is a {type(value).__name__}, without plain bytes"
    return None


def cpu_state_keys(optimizer: Optimizer, device: torch.device) -> frozenset[Any]:
    """Return the names of the state that ``optimizer`` keeps on the CPU for parameters on ``device``."""
    found = trained_copy(optimizer, device).state.values()
    tensors = [(name, value) for values in found for name, value in values.items() if isinstance(value, Tensor)]
    return frozenset(name for name, value in tensors if value.device == _CPU)


def seconds_on_cpu(optimizer: Optimizer) -> float:
    """Return the seconds of an update on the CPU, from those of large and small copies of each group's parameters."""
    seconds = 0.0
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        shape = list(max(group["params"], key=Tensor.numel).shape)
        while prod(shape) > _MAX_VALUES:
            largest = shape.index(max(shape))
            shape[largest] = (shape[largest] + 1) // 2
        small = [min(size, _SMALL_SIZE) for size in shape]
        count = min(len(group["params"]), -(-_MAX_VALUES // max(1, prod(shape))))
        each_seconds, large_seconds = (_seconds_of(optimizer, group, sizes, count) for sizes in (small, shape))
        value_seconds = max(0.0, large_seconds - each_seconds) / max(1, prod(shape) - prod(small))
        seconds += each_seconds * len(group["params"]) + value_seconds * sum(map(Tensor.numel, group["params"]))
    return seconds


def _seconds_of(optimizer: Optimizer, group: Mapping[str, Any], shape: Sequence[int], count: int) -> float:
    """Return the seconds for each of ``count`` parameters of ``shape``, updated with the settings of ``group``."""
    dtype = group["params"][0].dtype
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=_CPU)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    copied, seconds = copy_with(optimizer, [(group, parameters)], _CPU), []
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng([]):
        for _ in range(_UNTIMED + _TIMED):
            began = perf_counter()
            update_of(copied)(copied)
            seconds.append(perf_counter() - began)
    return min(seconds[_UNTIMED:]) / count
