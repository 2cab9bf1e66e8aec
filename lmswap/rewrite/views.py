"""Views that replace one tensor of a graph by another: the same geometry on other memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lmswap.runtime import ops
from lmswap.torch_compat.sized_graphs import SizeNodes, symbolic_value


def geometry(value: fx.Node) -> tuple[Any, ...]:
    """Return the geometry of ``value`` as traced: dtype, sizes, strides, storage offset, is conjugated, is negated."""
    tensor = value.meta["val"]
    place = tensor.dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    return *place, tensor.is_conj(), tensor.is_neg()


def sized_geometry(value: fx.Node, sizes: SizeNodes) -> tuple[Any, ...]:
    """Return the `geometry` of ``value`` with nodes of ``sizes`` for what is not the same in each run."""
    dtype, *_, is_conj, is_neg = geometry(value)
    tensor = symbolic_value(value)
    place = [*map(sizes.of, tensor.shape)], [*map(sizes.of, tensor.stride())], sizes.of(tensor.storage_offset())
    return dtype, *place, is_conj, is_neg


def view_of(storage: fx.Node, value: fx.Node, sizes: SizeNodes) -> fx.Node:
    """Insert, at the graph's insertion point, a view of ``storage``'s bytes with the geometry of ``value``.

    ``sizes`` are those of the graph.
    """
    return _view_of(storage, value, sized_geometry(value, sizes))


def alias_of(weight: fx.Node, value: fx.Node) -> fx.Node:
    """As `view_of`, of an input that may begin within its memory; if torch can, a view that shares its version."""
    traced, (dtype, size, stride, offset, *flags) = weight.meta["val"], geometry(value)
    if dtype == traced.dtype and offset == traced.storage_offset() and not any(flags):
        view: fx.Node = weight.graph.call_function(torch.ops.aten.as_strided.default, (weight, size, stride))
        view.meta.update(value.meta)
        return view
    # Offsets of views count from where the weight begins.
    own_offset = offset - traced.storage_offset() * traced.element_size() // dtype.itemsize
    return _view_of(weight, value, (dtype, size, stride, own_offset, *flags))


def _view_of(storage: fx.Node, value: fx.Node, place: tuple[Any, ...]) -> fx.Node:
    view: fx.Node = storage.graph.call_function(ops.view_bytes, (storage, *place))
    view.meta.update(value.meta)
    return view


def users_from(node: fx.Node, anchor: fx.Node) -> list[fx.Node]:
    """Return the users of ``node`` from ``anchor`` on."""
    return [user for user in node.users if not user < anchor]
