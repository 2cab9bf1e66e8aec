"""Notes on operators of a captured step whose results may differ from those of eager mode by rounding.

A trace cannot represent these as eager torch runs them (torch 2.13; no upstream issue known).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lmswap.capture.lower import Lowered
from lmswap.ir.program import BufferKind, Program
from lmswap.runtime.codegen import SegmentGraph
from lmswap.torch_compat.operators import OpOverload
from lmswap.torch_compat.pytree import tensors

ROUNDED_OTHERWISE = "results may differ from those of plain torch by rounding"  # prefix of notes
_FORMULA = "the formula of its gradient depends on values, which no trace has, and differs there"
_PIECES = "eager torch writes its pieces in place, where vectorized kernels round differently"
_FROZEN = "eager torch may run cuDNN's batch norm also where statistics are only read"
_ZEROS = "zeros in its gradient may have the other sign"
_SUM = "a trace sums the gradient of its value over all elements, eager torch over those that are filled"
_CAST = "eager torch casts a weight once under autocast, and sums its gradient in the lower precision"
_EVERYWHERE = ("cpu", "cuda")
_LOW = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten
# By operator: the devices where it differs, and the reason.
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
    _ATEN.unsafe_split.Tensor: (("cpu",), _PIECES),  # a GRUCell of 16 numbers
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
