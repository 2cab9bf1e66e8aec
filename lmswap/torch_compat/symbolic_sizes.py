"""Symbolic sizes: torch's SymInts, fake tensors that have them, and their values for the sizes of one call."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lmswap.torch_compat.pytree import tree_map_only
from lmswap.torch_compat.tensors import make_contiguous_strides_for, storage_id

Sizes = Mapping[sympy.Symbol, int]  # the numbers that symbols stand for in one call

_SYMBOLIC = "lmswap_symbolic"  # in the meta of a node: its value with symbolic sizes


def is_symbolic(value: Any) -> bool:
    """Return whether ``value`` is a number that may be another one in the next call."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_size(value: Any) -> bool:
    """Return whether ``value`` is such a whole number, or a condition: a size, or computed from sizes."""
    return isinstance(value, (torch.SymInt, torch.SymBool))


def traced_number(value: Any) -> Any:
    """Return the number that ``value`` was where it was traced; what is not symbolic as it is."""
    return value.node.hint if is_symbolic(value) else value


class RegionSizes:
    """The sizes among the inputs of Dynamo's graph of a region."""

    def __init__(self, region: fx.GraphModule) -> None:
        values = [node.meta["example_value"] for node in region.graph.find_nodes(op="placeholder")]
        sizes = [(place, value.node.expr) for place, value in enumerate(values) if is_size(value)]
        self._symbols = [(place, size) for place, size in sizes if isinstance(size, sympy.Symbol)]
        known = {symbol for _, symbol in self._symbols}
        # Others are computed from them.
        self._are_known = all(size.free_symbols <= known for _, size in sizes)
        self.varying = {
            place
            for place, value in enumerate(values)
            if isinstance(value, torch.Tensor) and _has_symbolic_sizes(value)
        }

    def of(self, arguments: Sequence[Any]) -> Sizes | None:
        """Return those of a call; None if they are not all that its tensors' sizes are computed from."""
        return {symbol: arguments[place] for place, symbol in self._symbols} if self._are_known else None


class SymbolicRegion:
    """Dynamo's graph of a region with sizes that are symbols still, to be traced at the sizes of one call."""

    def __init__(self, region: fx.GraphModule, arguments: Sequence[Any], sizes: Sizes) -> None:
        """``sizes`` are those of the call with these ``arguments``."""
        self.sizes = sizes
        self.module = copy.deepcopy(region)
        self._env = ShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self._env)
        values = [node.meta["example_value"] for node in region.graph.find_nodes(op="placeholder")]
        for value, argument in zip(values, arguments, strict=True):
            if is_symbolic(value) and isinstance(value.node.expr, sympy.Symbol):
                self._declare(value, argument)
        self.inputs = [self._fake(value, argument) for value, argument in zip(values, arguments, strict=True)]
        for node, given in zip(self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True):
            node.meta["example_value"] = given

    def serves(self, sizes: Sizes) -> bool:
        """Return whether what was traced holds for other ``sizes``, too."""
        numbers = {symbol: sympy.Integer(number) for symbol, number in sizes.items()}
        ranges = ((self._env.var_to_range[symbol], number) for symbol, number in numbers.items())
        if not all(allowed.lower <= number <= allowed.upper for allowed, number in ranges):
            return False
        return all(guard.expr.xreplace(numbers) == sympy.true for guard in self._env.guards)

    def _declare(self, size: torch.SymInt | torch.SymFloat, number: float) -> None:
        symbol = size.node.expr
        # As it is called since torch 2.12 or 2.13.
        declare: Any = getattr(self._env, "add_backed_var_to_val", None) or self._env.add_var_to_val
        declare(symbol, number)
        known = vars(size.node.shape_env)
        for facts in ("var_to_range", "var_to_range_sloc", "var_to_sources", "var_to_stack"):
            if symbol in known.get(facts, ()):
                vars(self._env)[facts][symbol] = known[facts][symbol]

    def _fake(self, value: Any, argument: Any) -> Any:
        if isinstance(value, torch.SymFloat):
            return self._env.create_symfloatnode(value.node.expr, hint=argument)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if not _has_symbolic_sizes(value):
            return self.fake_mode.from_tensor(argument, static_shapes=True)
        whole = self._size(value.untyped_storage().nbytes()) // value.element_size()
        where = [self._size(s) for s in value.shape], [self._size(s) for s in value.stride()]
        with self.fake_mode:
            made = torch.empty(whole, dtype=value.dtype, device=value.device).as_strided(
                *where, self._size(value.storage_offset())
            )
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, value.requires_grad)
        return made.requires_grad_(value.requires_grad)

    def _size(self, size: int | torch.SymInt) -> int | torch.SymInt:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        return self._env.create_symintnode(expression, hint=number_of(expression, self.sizes))


def number_of(size: int | torch.SymInt | sympy.Expr, sizes: Sizes) -> int:
    """Return what ``size`` is for ``sizes``."""
    if isinstance(size, int):
        return size
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(expression.xreplace({symbol: sympy.Integer(number) for symbol, number in sizes.items()}))


class BufferGrowth:
    """How the bytes of buffers depend on sizes."""

    def __init__(self, nbytes: Mapping[int, torch.SymInt]) -> None:
        """``nbytes``: by buffer, without those whose size is constant."""
        self._expressions = {buffer: size.node.expr for buffer, size in nbytes.items()}
        self._distinct = set(self._expressions.values())  # few: most buffers of a model have the size of another one

    def is_within(self, sizes: Sizes, others: Sizes) -> bool:
        """Return whether no buffer needs more for ``sizes`` than for ``others``."""
        return all(number_of(each, sizes) <= number_of(each, others) for each in self._distinct)

    def factors(self, sizes: Sizes, others: Sizes) -> Iterator[tuple[int, float]]:
        """Yield buffers, and the factors from their bytes for ``others`` to those for ``sizes``."""
        factors = {each: number_of(each, sizes) / max(1, number_of(each, others)) for each in self._distinct}
        return ((buffer, factors[expression]) for buffer, expression in self._expressions.items())


class FixedSizes:
    """Replaces the fake tensors of graphs by ones with the sizes of one call; those of one storage keep sharing it."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        """``sizes``: None are those where the graphs were traced."""
        self._sizes = sizes
        # Of storages, by those with symbolic sizes: these live in the metadata, so that their numbers are unique.
        self._wholes: dict[int, torch.Tensor] = {}

    def set(self, graph: fx.Graph) -> None:
        """Replace the fakes in the metadata of ``graph``; numbers among its values stay symbols."""
        for node in graph.nodes:
            value = node.meta.setdefault(_SYMBOLIC, node.meta.get("val"))
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
        return int(traced_number(size)) if self._sizes is None else number_of(size, self._sizes)


def fix_sizes(graph: fx.Graph) -> None:
    """Let the fakes of ``graph`` have the sizes with which it was traced, if some are symbolic."""
    if any(is_size(node.meta.get("val")) for node in graph.nodes):
        FixedSizes().set(graph)


def inline_sizes(graph: fx.Graph) -> None:
    """Let ops read the numbers with which ``graph`` was traced in place of symbolic ones, except as its results."""
    (output,) = graph.find_nodes(op="output")
    for node in reversed(graph.nodes):
        if not is_size(node.meta.get("val")):
            continue
        replace_by_number(node, traced_number(node.meta["val"]), keep=output)
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)


def replace_by_number(node: fx.Node, number: Any, *, keep: fx.Node | None = None) -> None:
    """Let all users of ``node`` but ``keep`` read ``number`` instead."""
    for user in [user for user in node.users if user is not keep]:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda given: number if given is node else given)


def symbolic_value(node: fx.Node) -> Any:
    """Return the value of ``node`` with symbolic sizes, where `FixedSizes` has replaced it, or else as it is."""
    return node.meta.get(_SYMBOLIC, node.meta.get("val"))


class TracedLayouts:
    """The strides that a graph was traced with for some of its inputs, for the sizes of each run."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        """``nodes`` are the inputs of ``graph`` in question."""
        self._traced = tuple(node.meta["val"].stride() for node in nodes)
        self._values = [symbolic_value(node) for node in nodes]
        numbers = [(place, node.meta.get("val")) for place, node in enumerate(graph.find_nodes(op="placeholder"))]
        self._numbers = [(place, value.node.expr) for place, value in numbers if isinstance(value, torch.SymInt)]
        self._is_sized = any(map(_has_symbolic_sizes, self._values))
        # What `differences` returns for the strides of the trace.
        self.none_differ: Hashable = self._traced
        if self._is_sized:
            self.none_differ = tuple((None,) * len(stride) for stride in self._traced)

    def sizes_of(self, arguments: Sequence[Any]) -> Sizes:
        """Return the sizes of a run with ``arguments``; none of a graph without symbolic sizes."""
        if not self._is_sized:
            return {}
        return {symbol: arguments[place] for place, symbol in self._numbers if isinstance(symbol, sympy.Symbol)}

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
            tuple(None if own == expected else own for own, expected in zip(tensor.stride(), stride, strict=True))
            for tensor, stride in zip(given, traced, strict=True)
        )


def _has_symbolic_sizes(value: torch.Tensor) -> bool:
    return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
