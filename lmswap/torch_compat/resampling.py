"""Kernels by which `interpolate` is traced as one operator each way where sizes are symbols.

torch's own C++ kernels take numbers only, and its Python kernels compute with indices instead (torch 2.13; no upstream
issue known).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

_Kernel = tuple[tuple[OpOverload[..., Any], DispatchKey], Callable[..., Tensor]]


def resampling_kernels(known: Iterable[OpOverload[..., Any]]) -> Iterator[_Kernel]:
    """Yield kernels for the resampling operators among ``known`` ones, and for their backwards."""
    for op in known:
        if op._overloadname == "vec":
            packet = op.overloadpacket
            yield (op, DispatchKey.CompositeImplicitAutograd), partial(_resample, packet.default)
            backward = getattr(torch.ops.aten, f"{packet.__name__}_backward").default
            if DispatchKey.Meta not in backward.py_kernels:
                yield (backward, DispatchKey.Meta), partial(_gradient, "linear" in packet.__name__)


def _resample(op: OpOverload[..., Tensor], x: Tensor, sides: Any, *others: Any) -> Tensor:
    *corners, factors = others
    sides = upsample_compute_output_size(x.shape, sides, factors)  # type: ignore[no-untyped-call]
    return op(x, sides, *corners, *(factors or [None] * len(sides)))


def _gradient(keeps_format: bool, entering: Tensor, _sides: Any, shape: Any, *_: Any) -> Tensor:
    gradient = entering.new_empty(shape)
    return gradient.to(memory_format=suggest_memory_format(entering)) if keeps_format else gradient
