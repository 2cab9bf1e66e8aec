"""Corrects the metadata of a graph's fake tensors where torch traced something else than its operators return.

Swapped bytes are restored as a tensor with the strides and dtype of the graph, so these must be the real ones. torch's
trace guesses them for some operators (torch 2.13; pytorch#192668 is on batch norm, pytorch#182200 on FFTs); where it
may be wrong the real ones are measured (`OutputMetadata`), and everything that depends on them is retraced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from lmswap.capture.lower import source_line
from lmswap.errors import CaptureError
from lmswap.runtime.codegen import value_of
from lmswap.torch_compat.operators import OpOverload
from lmswap.torch_compat.pytree import tensors, tree_map_only
from lmswap.torch_compat.tensors import make_contiguous_strides_for, storage_id

# Returns the tensors that an operator really makes on the device, or None where that is unknown.
OutputMetadata = Callable[[fx.Node], Sequence[torch.Tensor] | None]
# With bfloat16 weights on the CPU, torch traces bags for an index that the kernel leaves empty (torch 2.13; no upstream
# issue known).
_MISTRACED = (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


def retrace(graph: fx.Graph, changed: Collection[fx.Node], made: OutputMetadata) -> None:
    """Correct the fake tensors in ``meta["val"]`` from the ``changed`` nodes on, and where operators may differ.

    Raises:
        CaptureError: an operator rejects the strides that its inputs really have, so that the graph could not run.
    """
    seen, corrected = set(changed), set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or node in changed:
            continue
        reads_corrected = not corrected.isdisjoint(node.all_input_nodes)
        if not seen.isdisjoint(node.all_input_nodes) and _trace(node):
            seen.add(node)
            corrected.update({node} if reads_corrected else ())
        if not may_differ(node):
            continue
        found = made(node)
        if found is None and reads_corrected:
            where = f"op '{node.name}' ({source_line(node)})"
            raise CaptureError(f"{where} rejects the strides that its inputs really have: torch traced others")
        if found is not None and _correct(node, found):
            seen.add(node)
            corrected.add(node)


def may_differ(node: fx.Node) -> bool:
    """Return whether torch's trace of ``node`` may differ from what its operator makes.

    Seen on CPUs with torch 2.13: with a non-contiguous input, other strides (max_unpool2d; gradients of batch norm,
    log_softmax and padding), also of dimensions of size 1 (views), by which a convolution selects its layout; with an
    input that is a part of its storage, a result that is such a part of its own (copy: AOTAutograd traces a whole one);
    with norms of bfloat16 and weights of float32, results of float32.
    """
    if not isinstance(node.target, OpOverload) or node.target in _PRODUCTS:
        return False
    if node.target.overloadpacket in _MISTRACED:
        return True
    inputs = [value for given in node.all_input_nodes for value in tensors(given.meta["val"])]
    if len({value.dtype for value in inputs if value.is_floating_point()}) > 1:
        return True
    if all(map(_covers_storage, inputs)):
        return False
    # Traces of views and pointwise operators derive strides by the same rules, except for dimensions of size 1.
    is_ruled = node.target.is_view or torch.Tag.pointwise in node.target.tags
    return not is_ruled or any(1 in value.shape for value in tensors(node.meta.get("val")))


def _trace(node: fx.Node) -> bool:
    """Run ``node`` on its inputs' fakes; return whether its own changed, or are views of other ones."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    with tensors((args, kwargs))[0].fake_mode:  # type: ignore[attr-defined]
        value = target(*args, **kwargs)
    if not _shares_input_memory(node, value) and not any(
        map(_is_placed_differently, tensors(value), tensors(node.meta.get("val")))
    ):
        return False
    node.meta["val"] = value
    return True


def _correct(node: fx.Node, made: Sequence[torch.Tensor]) -> bool:
    """Set ``node``'s fakes to the metadata of ``made``; return whether they differed."""
    traced = tensors(node.meta.get("val"))  # empty if an operator returns nothing
    is_view = _shares_input_memory(node, node.meta.get("val"))
    if len(made) != len(traced) or not any(map(_differs if is_view else _is_placed_differently, made, traced)):
        return False
    real = iter(made)

    def corrected(fake: torch.Tensor) -> torch.Tensor:
        found = next(real)
        with fake.fake_mode:  # type: ignore[attr-defined]
            if is_view:
                return fake.as_strided(found.shape, found.stride(), fake.storage_offset())
            count = found.untyped_storage().nbytes() // found.element_size()
            whole = torch.empty(count, dtype=found.dtype, device=fake.device)
            return whole.as_strided(found.shape, found.stride(), found.storage_offset())

    node.meta["val"] = tree_map_only(torch.Tensor, corrected, node.meta["val"])
    return True


def _shares_input_memory(node: fx.Node, value: Any) -> bool:
    """Return whether ``value`` shares the memory of an input of ``node``."""
    given = [tensor for other in node.all_input_nodes for tensor in tensors(other.meta["val"])]
    storages = {storage_id(tensor.untyped_storage()) for tensor in given}
    return any(storage_id(tensor.untyped_storage()) in storages for tensor in tensors(value))


def _covers_storage(value: torch.Tensor) -> bool:
    """Return whether ``value`` is contiguous and covers its storage."""
    is_all = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return is_all and value.stride() == make_contiguous_strides_for(value.shape)


def _is_placed_differently(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the two differ in metadata, or in offset or size of their storages."""
    parts = [(tensor.storage_offset(), tensor.untyped_storage().nbytes()) for tensor in (one, other)]
    return _differs(one, other) or parts[0] != parts[1]


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride())
