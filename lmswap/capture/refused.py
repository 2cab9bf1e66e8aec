"""What may a region not hold, or not without a word, though Dynamo captures it? What its graph does otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._dynamo import utils
from torch.autograd import forward_ad

from lmswap.errors import CaptureError

# Torch 2.13 takes them into its graphs, and then cannot tell forward from backward ("Node … was invalid, but is
# output"), or finds no event when a graph that was compiled again runs.
_STREAMS = (torch.Stream, torch.Event)
_NUMPY = tuple(
    getattr(utils, name)
    for name in ("numpy_to_tensor_wrapper", "numpy_method_wrapper", "numpy_operator_wrapper")
    if hasattr(utils, name)
)
FLEX_ATTENTION = (
    "flex_attention runs in these graphs as plain torch runs it where nobody compiles it: with a matrix of all scores; "
    "where your own code compiles it, that takes less time and memory and rounds otherwise, and so does lmswap with "
    'compiler="inductor"'
)


def refuse_streams(region: fx.GraphModule) -> None:
    """Raises CaptureError if Dynamo's graph of a region names CUDA streams or events: graphs keep no order of them."""
    if any(_names_stream(node) for node in _nodes(region)):
        raise CaptureError(
            "the model's code names CUDA streams or events: graphs keep no order between streams, saved-tensor hooks "
            'do; with compiler="eager" they serve the model from the first call on'
        )


def refuse_numpy(region: fx.GraphModule) -> None:
    """Raises CaptureError if torch would compute in NumPy's place: other bits, and other random numbers."""
    if any(isinstance(node.target, _NUMPY) for node in _nodes(region)):
        raise CaptureError("the model's code computes with NumPy, in whose place a graph would take torch")


def refuse_forward_mode() -> None:
    """Raise CaptureError where code runs under forward-mode AD: what torch calls a graph by has no formula for it."""
    if forward_ad._current_level >= 0:
        raise CaptureError("the model's code computes forward-mode derivatives of it (torch.autograd.forward_ad)")


def has_flex_attention(region: fx.GraphModule) -> bool:
    """Whether Dynamo's graph of a region holds it as one op, which only Inductor computes without a matrix."""
    return any(node.target is torch.ops.higher_order.flex_attention for node in _nodes(region))


def _nodes(region: fx.GraphModule) -> Iterator[fx.Node]:
    for part in region.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _names_stream(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), _STREAMS) or str(node.target).startswith("streams.")
