"""Regions that Dynamo captures but whose graphs behave differently: refused, or noted in the report."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from lmswap.errors import CaptureError
from lmswap.torch_compat.autograd import in_forward_mode
from lmswap.torch_compat.dynamo import NUMPY_WRAPPERS

# torch 2.13 accepts these in graphs, but then cannot separate forward from backward ("Node … was invalid, but is
# output": pytorch#187695), or finds no event when a graph that was compiled twice runs (similar to pytorch#176486).
_STREAMS = (torch.Stream, torch.Event)
FLEX_ATTENTION = (
    "flex_attention runs in these graphs as in plain torch without torch.compile: with a matrix of all scores; "
    "compiled by your own code it takes less time and memory and rounds differently, and so it does with "
    'compiler="inductor"'
)


def refuse_streams(region: fx.GraphModule) -> None:
    """Raise CaptureError if Dynamo's graph of a region uses CUDA streams or events: graphs do not keep their order."""
    if any(_uses_stream(node) for node in _nodes(region)):
        raise CaptureError(
            "the model's code uses CUDA streams or events: graphs keep no order between streams, saved-tensor hooks "
            'do; with compiler="eager" they serve the model from the first call on'
        )


def refuse_numpy(region: fx.GraphModule) -> None:
    """Raise CaptureError if torch would replace NumPy: with other rounding, and other random numbers."""
    if any(isinstance(node.target, NUMPY_WRAPPERS) for node in _nodes(region)):
        raise CaptureError("the model's code computes with NumPy, which a graph would replace by torch")


def refuse_forward_mode() -> None:
    """Raise CaptureError under forward-mode AD: torch has no forward-mode formula for calls of graphs.

    torch 2.13 drops the tangents silently with Inductor (pytorch#187284).
    """
    if in_forward_mode():
        raise CaptureError("the model's code runs under forward-mode AD (torch.autograd.forward_ad)")


def has_flex_attention(region: fx.GraphModule) -> bool:
    """Return whether Dynamo's graph of a region has it as one op, which only Inductor computes without a matrix."""
    return any(node.target is torch.ops.higher_order.flex_attention for node in _nodes(region))


def _nodes(region: fx.GraphModule) -> Iterator[fx.Node]:
    for part in region.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _uses_stream(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), _STREAMS) or str(node.target).startswith("streams.")
