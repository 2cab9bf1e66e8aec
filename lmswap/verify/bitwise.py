"""Bitwise difference of two results: NaN equals NaN of the same payload, and 0.0 differs from -0.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lmswap.execute.storage import element_bytes


@dataclass(frozen=True)
class Difference:
    """``first``: index of the first differing element, and both values there; ``is_nan``: one of these is NaN."""

    num_differing: int
    num_elements: int
    first: str
    is_nan: bool = False


def difference(expected: Any, actual: Any) -> Difference | None:
    """Return how ``actual`` differs from ``expected``, or None if they are bitwise identical.

    Tensors are compared with dtype, shape and device; other objects by type and equality.
    """
    if not (isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor)):
        return None if type(expected) is type(actual) and expected == actual else _of_kind(expected, actual)
    if (expected.dtype, expected.shape, expected.device) != (actual.dtype, actual.shape, actual.device):
        return _of_kind(_kind(expected), _kind(actual))
    before, after = element_bytes(expected), element_bytes(actual)
    if torch.equal(before, after):
        return None
    differs = (before != after).view(-1, expected.element_size()).any(1)
    place = int(differs.nonzero()[0])
    values = [tensor.detach().reshape(-1)[place] for tensor in (expected, actual)]
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape)]
    first = f"first at {index}: {values[0].item()!r} without, {values[1].item()!r} with"
    is_nan = any(bool(value.isnan()) for value in values)
    return Difference(int(differs.sum()), expected.numel(), first, is_nan)


def _of_kind(expected: Any, actual: Any) -> Difference:
    return Difference(1, 1, f"{expected} without, {actual} with")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
