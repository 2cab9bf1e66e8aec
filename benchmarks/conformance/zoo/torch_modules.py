"""Which modules does torch test itself with? Every entry of its ``module_db`` with some of its sample inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

from benchmarks.conformance.trial import Call, Trial

_MODULES = {info.name: info for info in module_db}
NAMES = tuple(_MODULES)
# Of the samples of one module, in training mode and in evaluation mode; they have up to 857, some of the same shapes.
_MOST_SAMPLES = {True: 3, False: 1}


class Scaled(nn.Module):
    """A module behind a parameter, so that those train which have none, and those that write in place may do so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(0.9))  # what was a probability stays one

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """What the module makes of its differentiable inputs, scaled."""
        inputs, keywords = pytree.tree_map(self._scale, (inputs, keywords))
        return self.inner(*inputs, **keywords)

    def _scale(self, leaf: Any) -> Any:
        return leaf * self.scale if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def trials(name: str) -> Iterator[Trial]:
    """Samples of the module from first to last, in training mode and not."""
    info = _MODULES[name]
    for is_training, most in _MOST_SAMPLES.items():
        count = len(_samples(info, is_training))
        for number in sorted({position * count // most for position in range(most)} if count else ()):
            yield _trial(info, number, is_training)


def _trial(info: ModuleInfo, number: int, is_training: bool) -> Trial:
    def make_model() -> nn.Module:
        given = _samples(info, is_training)[number].constructor_input
        return Scaled(info.module_cls(*given.args, **given.kwargs))

    def make_call() -> Call:
        given = _samples(info, is_training)[number].forward_input
        call: Call = pytree.tree_map_only(Tensor, _as_leaf, (tuple(given.args), dict(given.kwargs)))
        return call

    return Trial(make_model, make_call, is_training)


def _as_leaf(tensor: Tensor) -> Tensor:
    """Samples for losses come out of log_softmax, through which a second step could not go back again."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _samples(info: ModuleInfo, is_training: bool) -> list[Any]:
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=is_training)
    return [sample for sample in made if sample.forward_input is not None]
