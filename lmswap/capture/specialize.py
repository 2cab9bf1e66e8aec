"""Specializes a region with dynamic sizes to each shape, so that each is captured and planned separately.

Without ``dynamic=False``, `torch.compile` traces one graph for all sizes when an input has a second size, as in the
last batch of an epoch. A byte budget needs numbers, so that graph is copied for the sizes of each call, with numbers in
place of symbols.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from lmswap.torch_compat.tensors import storage_id
from lmswap.torch_compat.tracing import FakeTensorMode, ShapeEnv, TracingContext, tracing

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def has_dynamic_sizes(region: fx.GraphModule) -> bool:
    """Return whether Dynamo's graph of a region takes sizes, besides tensors, that may change in the next call."""
    return any(
        isinstance(node.meta.get("example_value"), _SYMBOLIC) for node in region.graph.find_nodes(op="placeholder")
    )


def specialize(region: fx.GraphModule, compile_fixed: Compile) -> Callable[..., Any]:
    """Return a function that runs ``region`` by one graph per kind of arguments, each made by ``compile_fixed``."""
    known: dict[Hashable, Callable[..., Any]] = {}

    def run(*arguments: Any) -> Any:
        kind = _kind(arguments)
        if kind not in known:
            known[kind] = _compile(region, arguments, compile_fixed)
        return known[kind](*arguments)

    return run


def _kind(arguments: Sequence[Any]) -> Hashable:
    """Return what a graph depends on besides Dynamo's guards: sizes, and which arguments share memory."""
    first: dict[int, int] = {}  # by tensor and by storage: the position of its first argument
    return tuple(
        (
            argument.shape,
            argument.stride(),
            argument.storage_offset(),
            first.setdefault(id(argument), place),
            first.setdefault(storage_id(argument.untyped_storage()), place),
        )
        if isinstance(argument, torch.Tensor)
        else argument
        for place, argument in enumerate(arguments)
    )


def _compile(region: fx.GraphModule, arguments: Sequence[Any], compile_fixed: Compile) -> Callable[..., Any]:
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    fixed, places = _with_sizes(region, arguments, fake_mode)
    fakes = [node.meta["example_value"] for node in fixed.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(fake_mode)):
        compiled = compile_fixed(fixed, fakes)
    return lambda *given: compiled(*(given[place] for place in places))


def _with_sizes(
    region: fx.GraphModule, arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[int]]:
    """Return a copy of ``region`` for the sizes of ``arguments``, and the positions of the tensors among them."""
    fixed, places = copy.deepcopy(region), []
    inputs = fixed.graph.find_nodes(op="placeholder")
    for place, (node, argument) in enumerate(zip(inputs, arguments, strict=True)):
        if isinstance(argument, torch.Tensor):
            node.meta["example_value"] = fake_mode.from_tensor(argument, static_shapes=True)
            places.append(place)
        else:
            _replace(node, argument)
            fixed.graph.erase_node(node)
    fixed.recompile()
    return fixed, places


def _replace(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda used: value if used is node else used)
        user.kwargs = fx.map_arg(user.kwargs, lambda used: value if used is node else used)
