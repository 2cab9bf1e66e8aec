"""Training of a sample of torch's own tests: behind a parameter, so that its saved tensors can be swapped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.conformance.trial import Call


class Scaled(nn.Module):
    """A module behind a parameter, so that those train which have none, and those that write in place may do so."""

    def __init__(self, inner: nn.Module, scale: float, *, copies: bool) -> None:
        """With ``copies``, what it gives are copies: the inner module's own results are free to leave."""
        super().__init__()
        self.inner, self.copies = inner, copies
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """What the module makes of its differentiable inputs, scaled."""
        inputs, keywords = pytree.tree_map(self._scale, (inputs, keywords))
        results = self.inner(*inputs, **keywords)
        return pytree.tree_map(_copied, results) if self.copies else results

    def _scale(self, leaf: Any) -> Any:
        return leaf * self.scale.to(leaf.dtype) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def fresh_call(args: Iterable[Any], kwargs: dict[str, Any]) -> Call:
    """A call with copies of the sample's tensors, which it may write to, and which nothing was computed from.

    Samples for losses come out of log_softmax, through which a second step could not go back again.
    """
    call: Call = pytree.tree_map_only(Tensor, _leaf, (tuple(args), dict(kwargs)))
    return call


def seeded(make: Callable[[], Iterable[Any]]) -> list[Any]:
    """The same samples each time, whatever they draw their numbers from."""
    torch.manual_seed(0)
    random.seed(0)
    return list(make())


def spread(samples: list[Any], most: int) -> Iterator[tuple[int, bool, Any]]:
    """At most so many of the samples, from the first to the last, with their numbers; every other is to give copies."""
    count = len(samples)
    numbers = sorted({position * count // most for position in range(most)}) if count else []
    for position, number in enumerate(numbers):
        yield number, position % 2 == 0, samples[number]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
