"""Views that replace one tensor of a graph by another: the same geometry on other memory."""

from __future__ import annotations

from typing import Any

from torch import fx

from lmswap.runtime import ops


def geometry(value: fx.Node) -> tuple[Any, ...]:
    """Return the geometry of ``value`` as traced: dtype, sizes, strides, storage offset, is conjugated, is negated."""
    tensor = value.meta["val"]
    place = tensor.dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    return *place, tensor.is_conj(), tensor.is_neg()


def view_of(storage: fx.Node, value: fx.Node, *, origin: Any = None) -> fx.Node:
    """Insert, at the graph's insertion point, a view of ``storage``'s bytes with the geometry of ``value``.

    ``origin`` is the traced tensor of ``storage`` if that is itself a view, which may begin within its memory.
    """
    dtype, size, stride, offset, *flags = geometry(value)
    if origin is not None:  # offsets count from the first byte of ``storage``
        offset -= origin.storage_offset() * origin.element_size() // dtype.itemsize
    view: fx.Node = storage.graph.call_function(ops.view_bytes, (storage, dtype, size, stride, offset, *flags))
    view.meta.update(value.meta)
    return view


def users_from(node: fx.Node, anchor: fx.Node) -> list[fx.Node]:
    """Return the users of ``node`` from ``anchor`` on."""
    return [user for user in node.users if not user < anchor]
