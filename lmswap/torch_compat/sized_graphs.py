"""Graphs that were traced with symbolic sizes: their fake tensors for the sizes of one call, and nodes for sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import Max
from torch.utils._sympy.printers import PythonPrinter

from lmswap.torch_compat.pytree import tree_map_only
from lmswap.torch_compat.symbolic_sizes import Sizes, is_size, number_of, traced_number
from lmswap.torch_compat.tensors import storage_id

# In the meta of a node, once `FixedSizes` has replaced its fakes: its value with symbolic sizes; of a size, the number.
_SYMBOLIC, _NUMBER = "lmswap_symbolic", "lmswap_number"


class FixedSizes:
    """Replaces the fake tensors of graphs by ones with the sizes of one call; those of one storage keep sharing it."""

    def __init__(self, sizes: Sizes | None) -> None:
        """``sizes``: None are those where the graphs were traced."""
        self._sizes = sizes
        # Of storages, by those with symbolic sizes: these live in the metadata, so that their numbers are unique.
        self._wholes: dict[int, torch.Tensor] = {}

    def set(self, graph: fx.Graph) -> None:
        """Replace the fakes in the metadata of ``graph``; sizes among its values stay symbols, see `fixed_number`."""
        for node in graph.nodes:
            value = node.meta.setdefault(_SYMBOLIC, node.meta.get("val"))
            if is_size(value):
                node.meta[_NUMBER] = self._number_of(value)
            node.meta["val"] = tree_map_only(torch.Tensor, self._fixed, value)

    def _fixed(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_conj() or value.is_neg() or value.is_sparse:
            kind = "a conjugate, negated or sparse tensor"
            raise NotImplementedError(f"{kind} of {value.dtype} has a size that changes from call to call")
        storage = value.untyped_storage()
        with value.fake_mode:  # type: ignore[attr-defined]
            whole = self._wholes.get(storage_id(storage))
            if whole is None:
                whole = torch.empty(self._number(storage.nbytes()), dtype=torch.uint8, device=value.device)
                self._wholes[storage_id(storage)] = whole
            where = [*map(self._number, value.shape)], [*map(self._number, value.stride())]
            return whole.view(value.dtype).as_strided(*where, self._number(value.storage_offset()))

    def _number(self, size: int | torch.SymInt) -> int:
        return int(self._number_of(size))

    def _number_of(self, size: int | torch.SymInt | torch.SymBool) -> int | bool:
        if self._sizes is None:
            return traced_number(size)  # type: ignore[no-any-return]
        return number_of(size, self._sizes)


def fix_sizes(graph: fx.Graph, sizes: Sizes | None) -> None:
    """Let the fakes of ``graph`` have ``sizes``, or those with which it was traced, if some are symbolic."""
    if has_sizes(graph):
        FixedSizes(sizes).set(graph)


def has_sizes(graph: fx.Graph) -> bool:
    """Return whether ``graph`` was traced with symbolic sizes."""
    return any(is_size(node.meta.get("val")) for node in graph.nodes)


def fixed_number(node: fx.Node) -> Any:
    """Return the number that the value of ``node``, if it is symbolic, is for the sizes of its graph's fakes."""
    return node.meta[_NUMBER] if _NUMBER in node.meta else traced_number(node.meta.get("val"))


def inline_sizes(graph: fx.Graph) -> None:
    """Let ops read the numbers with which ``graph`` was traced in place of symbolic ones, except as its results."""
    (output,) = graph.find_nodes(op="output")
    for node in reversed(graph.nodes):
        if not is_size(node.meta.get("val")):
            continue
        replace_by_number(node, fixed_number(node), keep=output)
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)
    for node in graph.nodes:
        node.meta.pop(_SYMBOLIC, None)


def replace_by_number(node: fx.Node, number: Any, *, keep: fx.Node | None = None) -> None:
    """Let all users of ``node`` but ``keep`` read ``number`` instead."""
    for user in [user for user in node.users if user is not keep]:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda given: number if given is node else given)


def symbolic_value(node: fx.Node) -> Any:
    """Return the value of ``node`` with symbolic sizes, where `FixedSizes` has replaced it, or else as it is."""
    return node.meta.get(_SYMBOLIC, node.meta.get("val"))


def value_meta(node: fx.Node) -> dict[str, Any]:
    """Return what the metadata of ``node`` says of its value, for another node with the same one."""
    return {key: node.meta[key] for key in ("val", _SYMBOLIC, _NUMBER) if key in node.meta}


def constant_meta(value: torch.Tensor) -> dict[str, Any]:
    """Return what `value_meta` would for a node with the fake tensor ``value``, whose size is a constant."""
    return {"val": value, _SYMBOLIC: value}


def clone_meta(node: fx.Node) -> dict[str, Any]:
    """Return what `value_meta` would for a clone of ``node``, which has a fake tensor."""
    return {key: value.clone() for key, value in value_meta(node).items()}


def is_sized(node: fx.Node, sizes: Sizes) -> bool:
    """Return whether the fake tensor of ``node``, for ``sizes``, is its tensor with symbolic sizes.

    It is not where the fake was replaced since, by what the operator really makes.
    """
    if not sizes or node.op == "get_attr":  # a constant
        return True
    if _SYMBOLIC not in node.meta:
        return False
    fake, symbolic = node.meta["val"], node.meta[_SYMBOLIC]
    own, given = (
        (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
        for value in (fake, symbolic)
    )
    if fake.dtype != symbolic.dtype or len(own) != len(given):
        return False
    return all(number_of(size, sizes) == number for size, number in zip(given, own, strict=True))


def covers_storage(node: fx.Node) -> bool:
    """Return whether the tensor of ``node`` has as many bytes as its storage, for all sizes but those of empty ones."""
    value = symbolic_value(node)
    own_bytes = value.itemsize * math.prod(map(_expression, value.shape))
    uncovered = _expression(value.untyped_storage().nbytes()) - own_bytes
    return bool(uncovered == 0) or bool(sympy.expand(uncovered) == 0)


def _expression(size: int | torch.SymInt) -> Any:
    """Return the expression of ``size``, in which strides of empty tensors are 0."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    for least in expression.atoms(Max):
        if len(least.args) == 2 and sympy.S.One in least.args:
            (other,) = (given for given in least.args if given != 1)
            expression = expression.xreplace({least: other})
    return expression


def symbols_of(graph: fx.Graph) -> dict[sympy.Expr, fx.Node]:
    """Return the inputs of ``graph`` that are symbolic sizes, by symbol."""
    inputs = ((node.meta.get("val"), node) for node in graph.find_nodes(op="placeholder"))
    symbols = ((value.node.expr, node) for value, node in inputs if isinstance(value, torch.SymInt))
    return {expression: node for expression, node in symbols if isinstance(expression, sympy.Symbol)}


class SizeNodes:
    """Nodes of a graph for numbers that are computed from its symbolic sizes, all of which are its inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._nodes = graph, symbols_of(graph)
        self._symbols = dict(self._nodes)

    def of(self, size: int | torch.SymInt) -> Any:
        """Return a node for ``size``, or the number."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression not in self._nodes:
            self._nodes[expression] = self._insert(expression, size)
        return self._nodes[expression]

    def _insert(self, expression: sympy.Expr, size: torch.SymInt) -> fx.Node:
        given = sorted(expression.free_symbols, key=str)
        first = next(node for node in self._graph.nodes if node.op != "placeholder")
        inputs = tuple(self._symbols[symbol] for symbol in given)
        with self._graph.inserting_before(first):
            node = self._graph.call_function(_SizeFunction(expression, given), inputs)
        numbers = {symbol: fixed_number(self._symbols[symbol]) for symbol in given}
        node.meta.update({"val": size, _NUMBER: number_of(size, numbers)})
        return node


class _SizeFunction:
    """Computes a size from others, as the target of a node."""

    def __init__(self, expression: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> None:
        self.__name__, self.__module__ = "size", __name__
        code = f"lambda {', '.join(map(str, symbols))}: {PythonPrinter().doprint(expression)}"
        self._compute: Any = eval(code, {"math": math, "torch": torch})  # of torch's own text

    def __call__(self, *sizes: int) -> int:
        return int(self._compute(*sizes))

    def __deepcopy__(self, _: object) -> _SizeFunction:
        return self
