"""Traces the operators that eager torch runs, where torch's Python kernels would decompose them.

torch traces `dropout` as `native_dropout`, `matmul` as its own choice between products, `interpolate` as arithmetic on
indices: other rounding, or other kernels (from 64³ to 128³ in the 3D U-Net the gradient of nearest takes 0.06 s instead
of 0.28 s on two cores, and trilinear saves none of the eight corners that it reads). These kernels are removed during a
trace, and torch's own code chooses by device, dtype and strides, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmswap.capture.lower import Lowered, tensors
from lmswap.capture.numerics.random_ops import draw_in_place
from lmswap.execute.codegen import SegmentGraph
from lmswap.ir.program import BufferKind, Program
from lmswap.torch_compat.dynamo import ConstantVariable, replaced_handlers
from lmswap.torch_compat.operators import OpOverload, own_python_kernels

ROUNDED_OTHERWISE = "results may differ from those of plain torch by rounding"  # prefix of notes
_LOW = (torch.float16, torch.bfloat16)
# These write running statistics that their schemas declare read-only; others are traced in their place.
_UNDECLARED_WRITERS = (torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm)
_CUDNN_BATCH_NORM = torch.ops.aten.cudnn_batch_norm.default
# torch's trace of it draws in another order where strides are unusual.
_BERNOULLI = torch.ops.aten.bernoulli_.float
_FORMULA = "the formula of its gradient depends on values, which no trace has, and differs there"
_PIECES = "eager torch writes its pieces in place, where vectorized kernels round differently"
_FROZEN = "eager torch may run cuDNN's batch norm also where statistics are only read"
_ZEROS = "zeros in its gradient may have the other sign"
_SUM = "a trace sums the gradient of its value over all elements, eager torch over those that are filled"
_CAST = "eager torch casts a weight once under autocast, and sums its gradient in the lower precision"
_EVERYWHERE = ("cpu", "cuda")
_ATEN = torch.ops.aten
# Operators that a trace cannot represent as eager torch runs them: the devices, and the reason.
_DIFFERING: dict[OpOverload[..., Any], tuple[tuple[str, ...], str]] = {
    _ATEN.prod.default: (_EVERYWHERE, _FORMULA),
    _ATEN.prod.dim_int: (_EVERYWHERE, _FORMULA),
    _ATEN.cumprod.default: (_EVERYWHERE, _FORMULA),
    _ATEN.ormqr.default: (_EVERYWHERE, _FORMULA),
    _ATEN.max.default: (_EVERYWHERE, _ZEROS),
    _ATEN.min.default: (_EVERYWHERE, _ZEROS),
    _ATEN.median.default: (_EVERYWHERE, _ZEROS),
    _ATEN.nanmedian.default: (_EVERYWHERE, _ZEROS),
    _ATEN.masked_fill.Tensor: (_EVERYWHERE, _SUM),
    _ATEN.unsafe_split.Tensor: (("cpu",), _PIECES),  # seen: GRUCell of 16 numbers
    _ATEN._batch_norm_no_update.default: (("cuda",), _FROZEN),
}


def numerics_note(lowered: Lowered) -> str | None:
    """Return a sentence on operators of a step whose results may differ from those of plain torch by rounding."""
    found: dict[str, str] = {}
    if any(map(partial(_casts_twice, lowered.program), lowered.graphs)):
        found["_to_copy"] = _CAST
    for node in (op for graph in lowered.graphs for op in graph.ops):
        target: Any = node.target
        devices, reason = _DIFFERING.get(target, ((), ""))
        if any(made.device.type in devices for made in tensors(node.meta.get("val"))):
            found[str(target.overloadpacket)] = reason
    if not found:
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items())
    return f"{ROUNDED_OTHERWISE}: {reasons}"


def _casts_twice(program: Program, graph: SegmentGraph) -> bool:
    """Return whether a forward casts a weight down more than once, as a trace under autocast does for shared ones."""
    casts = [
        graph.buffer_of.get(op.all_input_nodes[0], -1)
        for op in graph.ops
        if op.target is _ATEN._to_copy.default and op.kwargs.get("dtype") in _LOW
    ]
    weights = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.PARAMETER}
    return graph.phase == "forward" and any(casts.count(weight) > 1 for weight in weights.intersection(casts))


@contextmanager
def no_dynamo_decompositions() -> Iterator[None]:
    """Make Dynamo capture calls of addcdiv, which it would decompose for Inductor, as other functions.

    To be used together with `lmswap.torch_compat.dynamo.NO_DECOMPOSITIONS`, which does not affect this function (torch
    2.13; pytorch#176799 is on its methods).
    """

    def handle(decompose: Callable[..., Any], function: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        is_number = isinstance(kwargs.get("value"), ConstantVariable)  # a tensor's value would break the graph
        return None if is_number else decompose(function, tracer, *args, **kwargs)

    with replaced_handlers((torch.addcdiv,), handle):
        yield


@contextmanager
def no_python_kernels() -> Iterator[None]:
    """Make traces contain the operators that eager torch runs."""
    with own_python_kernels({_BERNOULLI: draw_in_place, _CUDNN_BATCH_NORM: _normalize}, keep=_UNDECLARED_WRITERS):
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
