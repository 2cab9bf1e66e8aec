"""Traces the operators that eager torch runs, where torch's Python kernels would decompose them.

torch traces `dropout` as `native_dropout`, `matmul` as its own choice between products, `interpolate` as arithmetic on
indices: other rounding, or other kernels (from 64³ to 128³ in the 3D U-Net the gradient of nearest takes 0.06 s instead
of 0.28 s on two cores, and trilinear saves none of the eight corners that it reads). These kernels are removed during a
trace, and torch's own code chooses by device, dtype and strides, as in eager mode (torch 2.13; no upstream issue known
of the rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lmswap.capture.numerics.random_ops import bernoulli_in_place
from lmswap.torch_compat.dynamo import IS_MAKE_FX_TRACING, ConstantVariable, replaced_handlers
from lmswap.torch_compat.operators import own_python_kernels

# These write running statistics that their schemas declare read-only (pytorch#73050); others are traced in their place.
_UNDECLARED_WRITERS = (torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm)
_CUDNN_BATCH_NORM = torch.ops.aten.cudnn_batch_norm.default
# torch's trace of it draws in another order where strides are unusual (torch 2.13; no upstream issue known).
_BERNOULLI = torch.ops.aten.bernoulli_.float
_ATEN = torch.ops.aten


@contextmanager
def no_dynamo_decompositions() -> Iterator[None]:
    """Make Dynamo capture what eager torch calls, where it would decompose that.

    Calls of addcdiv, to be used with `lmswap.torch_compat.dynamo.NO_DECOMPOSITIONS`, which does not affect this
    function (torch 2.13; pytorch#176799 is on its methods); and `nn.MultiheadAttention` without gradients, which is one
    operator, with other rounding.
    """

    def is_not_tracing(_: Callable[..., Any], function: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        return ConstantVariable.create(False)

    def handle(decompose: Callable[..., Any], function: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        is_number = isinstance(kwargs.get("value"), ConstantVariable)  # a tensor's value would break the graph
        return None if is_number else decompose(function, tracer, *args, **kwargs)

    with (
        replaced_handlers((torch.addcdiv,), handle),
        replaced_handlers((IS_MAKE_FX_TRACING,), is_not_tracing),
    ):
        yield


@contextmanager
def no_python_kernels() -> Iterator[None]:
    """Make traces contain the operators that eager torch runs."""
    with own_python_kernels({_BERNOULLI: bernoulli_in_place, _CUDNN_BATCH_NORM: _normalize}, keep=_UNDECLARED_WRITERS):
        yield


def _normalize(  # noqa: PLR0917 (as the operator has them)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch norm by operators that declare their writes, and select cuDNN's kernel as eager torch does.

    torch's own trace of `cudnn_batch_norm` rounds differently: on an H200 ResNet-50 had other losses.
    """
    if not training:
        return _ATEN._batch_norm_no_update.default(x, weight, bias, running_mean, running_var, momentum, eps)
    if running_mean is None or running_var is None:  # written, but not read
        running_mean, running_var = torch.zeros_like(weight), torch.zeros_like(weight)
    return _ATEN._batch_norm_with_update.default(x, weight, bias, running_mean, running_var, momentum, eps)
