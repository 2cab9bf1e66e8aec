"""A trial of whether an optimizer's update may run on parts of its parameters, one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmswap.torch_compat.optimizers import update_of

_MAX_PARAMETERS, _MAX_SIZE = 3, 8  # of a group's copies, and of their dimensions
# Of the gradients of each step: what depends on all of them, as clipping by their norm does, may show at one size only.
_SCALES = (1.0, 1e-4, 1e4, 1.0)


def why_updates_are_whole(optimizer: Optimizer) -> str | None:
    """Return a sentence if updates of ``optimizer`` in parts have other bits than whole ones, or cannot be tried.

    Small copies of its parameters take some steps with its settings, once whole, once parameter by parameter.
    """
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    on_gpus = [device for device in devices if device.type == "cuda"]
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(on_gpus):
        try:
            is_same = all(map(torch.equal, _trained(optimizer, _whole), _trained(optimizer, _one_by_one)))
        except Exception as error:  # of any package: it needs more than groups to be made, closures, sparse gradients
            why = f"small copies of its parameters could not be updated to try it ({type(error).__name__}: {error})"
        else:
            why = "small copies of its parameters, updated one after the other, had other bits than updated at once"
            if is_same:
                return None
    name = type(optimizer).__name__
    return f"optimizer={name}: its state, and what it updates, stay resident: {why}"


def _whole(optimizer: Optimizer) -> None:
    update_of(optimizer)(optimizer)


def _one_by_one(optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    given = [group["params"] for group in groups]
    for number, parameters in enumerate(given):
        for parameter in parameters:
            for other, group in enumerate(groups):
                group["params"] = [parameter] if other == number else []
            _whole(optimizer)
    for group, parameters in zip(groups, given, strict=True):
        group["params"] = parameters


def _trained(optimizer: Optimizer, update: Callable[[Optimizer], None]) -> list[Tensor]:
    """Return the parameters and the state of a small copy of ``optimizer`` after some steps by ``update``."""
    torch.manual_seed(0)
    settings = [{name: value for name, value in g.items() if name != "param_names"} for g in optimizer.param_groups]
    groups = [{**group, "params": [*_small_copies(group["params"])]} for group in settings]
    parameters = [parameter for group in groups for parameter in group["params"]]
    kind: Callable[..., Optimizer] = type(optimizer)
    copied = kind(groups)
    for scale in _SCALES:
        for parameter in parameters:
            parameter.grad = (scale * torch.randn(parameter.shape)).to(parameter)
        update(copied)
    state = (value for parameter in parameters for value in copied.state[parameter].values())
    return [*parameters, *(value for value in state if isinstance(value, Tensor))]


def _small_copies(parameters: Sequence[Tensor]) -> Iterator[nn.Parameter]:
    for parameter in parameters[:_MAX_PARAMETERS]:
        yield nn.Parameter(torch.randn([min(size, _MAX_SIZE) for size in parameter.shape]).to(parameter))
