"""Symbolic sizes: torch's SymInts, regions that are traced with them, and their values for the sizes of one call."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Sizes = Mapping[sympy.Symbol, int]  # the numbers that symbols stand for in one call


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
        given = zip(values, arguments, strict=True)
        # Torch passes a size that two tensors have twice.
        symbols = {value.node.expr: (value, argument) for value, argument in given if is_symbolic(value)}
        for symbol, (value, argument) in symbols.items():
            if isinstance(symbol, sympy.Symbol):
                self._declare(value, argument)
        self.inputs = [self._fake(value, argument) for value, argument in zip(values, arguments, strict=True)]
        for node, given in zip(self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True):
            node.meta["example_value"] = given

    def largest(self, sizes: Sizes) -> Sizes:
        """Return ``sizes`` with those at their largest that `torch._dynamo.mark_dynamic` declared with a ``max``."""
        declared = {symbol: self._env.var_to_range[symbol].upper for symbol in sizes}
        return {**sizes, **{symbol: int(size) for symbol, size in declared.items() if isinstance(size, sympy.Integer)}}

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
        if not has_symbolic_sizes(value):
            return self.fake_mode.from_tensor(argument, static_shapes=True)
        where = [self._size(s) for s in value.shape], [self._size(s) for s in value.stride()]
        offset, nbytes = self._size(value.storage_offset()), value.untyped_storage().nbytes()
        if isinstance(nbytes, int) or nbytes.node.expr.free_symbols <= set(self.sizes):
            whole = self._size(nbytes) // value.element_size()
        else:  # a part of another tensor, as tokens[:, :-1] is: its storage has a symbol of its own
            whole = offset + 1 + sum((size - 1) * stride for size, stride in zip(*where, strict=True))
        with self.fake_mode:
            made = torch.empty(whole, dtype=value.dtype, device=value.device).as_strided(*where, offset)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, value.requires_grad)
        return made.requires_grad_(value.requires_grad)

    def _size(self, size: int | torch.SymInt) -> int | torch.SymInt:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        return self._env.create_symintnode(expression, hint=number_of(expression, self.sizes))


def number_of(size: int | torch.SymInt | torch.SymBool | sympy.Expr, sizes: Sizes) -> int:
    """Return what ``size`` is for ``sizes``."""
    if isinstance(size, int):
        return size
    expression: Any = size.node.expr if isinstance(size, (torch.SymInt, torch.SymBool)) else size
    found = expression.xreplace({symbol: sympy.Integer(number) for symbol, number in sizes.items()})
    return bool(found) if isinstance(size, torch.SymBool) else int(found)


class BufferGrowth:
    """How the bytes of buffers depend on sizes."""

    def __init__(self, nbytes: Mapping[int, torch.SymInt]) -> None:
        """``nbytes``: by buffer, without those whose size is constant."""
        self._expressions = {buffer: size.node.expr for buffer, size in nbytes.items()}
        self._distinct = set(self._expressions.values())  # few: most buffers of a model have the size of another one

    def is_within(self, sizes: Sizes, others: Sizes, among: Iterable[int] | None = None) -> bool:
        """Return whether no buffer, or none ``among`` them, needs more for ``sizes`` than for ``others``."""
        distinct = self._distinct
        if among is not None:
            distinct = {self._expressions[buffer] for buffer in among if buffer in self._expressions}
        return all(number_of(each, sizes) <= number_of(each, others) for each in distinct)

    def factors(self, sizes: Sizes, others: Sizes) -> Iterator[tuple[int, float]]:
        """Yield buffers, and the factors from their bytes for ``others`` to those for ``sizes``."""
        factors = {each: number_of(each, sizes) / max(1, number_of(each, others)) for each in self._distinct}
        return ((buffer, factors[expression]) for buffer, expression in self._expressions.items())


def has_symbolic_sizes(value: torch.Tensor) -> bool:
    """Return whether shape, strides or offset of ``value`` are not all numbers."""
    return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
