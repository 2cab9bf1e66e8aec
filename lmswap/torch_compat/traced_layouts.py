"""Layouts of tensors with other sizes than those of a trace: strides, and the order of dimensions in memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from lmswap.torch_compat.sized_graphs import symbolic_value, symbols_of
from lmswap.torch_compat.symbolic_sizes import Sizes, has_symbolic_sizes, is_symbolic, number_of
from lmswap.torch_compat.tensors import make_contiguous_strides_for


class TracedLayouts:
    """The strides that a graph was traced with for some of its inputs, for the sizes of each run."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        """``nodes`` are the inputs of ``graph`` in question."""
        self._traced = tuple(node.meta["val"].stride() for node in nodes)
        self._values = [symbolic_value(node) for node in nodes]
        inputs = list(graph.find_nodes(op="placeholder"))
        self._symbols = [(inputs.index(node), symbol) for symbol, node in symbols_of(graph).items()]
        self._is_sized = any(map(has_symbolic_sizes, self._values))
        # What `differences` returns for the strides of the trace.
        self.none_differ: Hashable = (None,) * len(nodes) if self._is_sized else self._traced

    def sizes_of(self, arguments: Sequence[Any]) -> Sizes:
        """Return the sizes of a run with ``arguments``; none of a graph without symbolic sizes."""
        if not self._is_sized:
            return {}
        return {symbol: arguments[place] for place, symbol in self._symbols}

    def strides(self, sizes: Sizes, given: Sequence[torch.Tensor]) -> Sequence[Sequence[int]]:
        """Return the strides of the trace for ``sizes``; contiguous ones where these depend on others."""
        if not sizes and not self._is_sized:
            return self._traced
        return [self._strides(value, sizes, tensor) for value, tensor in zip(self._values, given, strict=True)]

    def _strides(self, value: torch.Tensor, sizes: Sizes, given: torch.Tensor) -> Sequence[int]:
        known = dict(sizes)
        size: Any
        for size, number in zip(value.shape, given.shape, strict=True):
            if is_symbolic(size) and isinstance(size.node.expr, sympy.Symbol):
                known[size.node.expr] = number
        try:
            return [number_of(stride, known) for stride in value.stride()]
        except TypeError:  # of an expression with other symbols
            return make_contiguous_strides_for(given.shape)

    def differences(self, traced: Sequence[Sequence[int]], given: Sequence[torch.Tensor]) -> Hashable:
        """Return a key for how the strides of ``given`` differ from the ``traced`` ones, whatever the sizes."""
        if not self._is_sized:
            return tuple(tensor.stride() for tensor in given)
        return tuple(
            None if tensor.stride() == tuple(stride) else dimension_order(tensor) or tensor.stride()
            for tensor, stride in zip(given, traced, strict=True)
        )


def dimension_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the rank of each dimension's stride, -1 for those of 0; None if elements are not dense in memory.

    Two tensors with other sizes have the same layout if that is the same.
    """
    expanded = [size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    inner_first = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i], -i))
    ranks, dense = [-1] * tensor.dim(), 1
    for rank, dimension in enumerate(i for i in inner_first if not expanded[i]):
        if tensor.shape[dimension] > 1 and tensor.stride(dimension) != dense:
            return None
        dense *= tensor.shape[dimension]
        ranks[dimension] = rank
    return tuple(ranks)


def strides_of(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of ``shape`` with this `dimension_order`."""
    strides, dense = [0] * len(shape), 1
    for dimension in sorted((i for i, rank in enumerate(order) if rank >= 0), key=order.__getitem__):
        strides[dimension] = dense
        dense *= shape[dimension]
    return tuple(strides)
