"""Execution of a captured fx graph: generated code that frees each value at its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import fx

from lmswap.runtime.ops import COPIES
from lmswap.runtime.rng import STATE, state_of
from lmswap.torch_compat.graphs import BoxedCodeGen, LazyGraphModule
from lmswap.torch_compat.operators import OpOverload, direct_call
from lmswap.torch_compat.sized_graphs import covers_storage, fixed_number, inline_sizes, symbols_of, value_meta
from lmswap.torch_compat.symbolic_sizes import is_size, is_symbolic

BoxedFunction = Callable[[list[Any]], Any]
_Code = TypeVar("_Code")
_MAX_VIEWS = 8  # between an output and the node of its graph


@dataclass
class SegmentGraph:
    """The fx graph of one segment, linked to its Program; ``ops[i]`` is op ``segment.start + i``.

    Its methods edit what forward and backward pass to each other: the forward's saved outputs are the backward's first
    inputs, in order.
    """

    module: fx.GraphModule
    phase: str  # "forward", "backward" or "inference"
    num_user_outputs: int  # leading outputs returned to the caller; the rest is saved for backward
    ops: list[fx.Node] = field(default_factory=list)
    buffer_of: dict[fx.Node, int] = field(default_factory=dict)  # tensor-valued nodes only

    @property
    def fx_graph(self) -> fx.Graph:
        """The graph itself."""
        return self.module.graph

    @property
    def inputs(self) -> list[fx.Node]:
        """Its inputs, in order."""
        return list(self.fx_graph.find_nodes(op="placeholder"))

    @property
    def output(self) -> fx.Node:
        """The node of all outputs."""
        output: fx.Node = next(iter(self.fx_graph.find_nodes(op="output")))
        return output

    @property
    def returned(self) -> list[Any]:
        """The outputs returned to the caller; all but constants are nodes."""
        return list(self.output.args[0])[: self.num_user_outputs]  # type: ignore[arg-type]

    @property
    def saved(self) -> list[Any]:
        """The outputs saved for the backward, in the order of its inputs; all but integers are nodes."""
        # The forward returns symbolic numbers last, and the backward takes them first.
        return sorted(list(self.output.args[0])[self.num_user_outputs :], key=_is_no_number)  # type: ignore[arg-type]

    def save(self, values: Iterable[Any]) -> None:
        """Replace the outputs saved for the backward by ``values``; of torch's descriptions, theirs are kept."""
        output, count = self.output, self.num_user_outputs
        returned, saved = list(output.args[0]), sorted(values, key=_is_no_number, reverse=True)  # type: ignore[arg-type]
        descriptions = output.meta.get("desc")
        if descriptions is not None and len(descriptions) == len(returned):
            described = dict(zip(returned[count:], descriptions[count:], strict=True))
            output.meta["desc"] = [*descriptions[:count], *map(described.get, saved)]
        output.args = ((*returned[:count], *saved),)

    def inline_sizes(self) -> None:
        """Let ops read the numbers of the trace in place of symbolic sizes, which are not passed on any more."""
        inline_sizes(self.fx_graph)
        if self.phase == "backward":
            for node in [node for node in self.inputs if is_size(_traced(node)) and not node.users]:
                self.fx_graph.erase_node(node)
        else:
            self.save(value for value in self.saved if not is_size(_traced(value)))

    def take(self, value: fx.Node, *, before: fx.Node | None = None) -> fx.Node:
        """Insert an input for ``value``, a node of another graph, and return its node; see `take_new`."""
        node = self.take_new(value.name, value.meta["val"], before=before)
        node.meta.update(value_meta(value))
        return node

    def take_new(self, name: str, value: Any, *, before: fx.Node | None = None) -> fx.Node:
        """Insert an input, and return its node.

        Args:
            name: of the argument.
            value: its fake tensor.
            before: the input that it precedes; by default the first one that is no symbolic number.
        """
        following = before or next(filter(_is_no_number, self.fx_graph.nodes))
        with self.fx_graph.inserting_before(following):
            node = self.fx_graph.placeholder(name)
        node.target = node.name  # another name for the argument would hold its memory to the end
        node.meta["val"] = value
        return node

    def drop(self, node: fx.Node) -> None:
        """Erase a node without users."""
        self.buffer_of.pop(node, None)
        self.fx_graph.erase_node(node)

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a fake tensor, as traced values are."""
        values = (node.meta.get("val") for node in self.fx_graph.nodes)
        with next(value.fake_mode for value in values if hasattr(value, "fake_mode")):
            return torch.empty(tuple(shape), dtype=dtype, device=device)


def without_backward(module: fx.GraphModule) -> SegmentGraph:
    """Return the graph of a segment without a backward, whose outputs are all returned to the caller."""
    (output,) = module.graph.find_nodes(op="output")
    return SegmentGraph(module, "inference", len(output.args[0]))


def pass_sizes(graphs: Sequence[SegmentGraph]) -> None:
    """Save all symbolic sizes that the forward takes for the backward, if there is one."""
    for forward, backward in pairwise(graphs):
        known = symbols_of(backward.fx_graph)
        for symbol, size in symbols_of(forward.fx_graph).items():
            if symbol not in known:
                backward.take(size, before=backward.inputs[0])
                forward.save([size, *forward.saved])


def first_op(graph: fx.Graph) -> fx.Node:
    """Return the first node of ``graph`` that is neither an input nor a size."""
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder" and not is_size(_traced(node)))
    return first


def _is_no_number(value: Any) -> bool:
    """Return whether ``value`` is no symbolic number."""
    return not is_symbolic(_traced(value))


def _traced(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def drop_unread(backward: SegmentGraph, saved: Iterable[tuple[fx.Node, fx.Node]]) -> list[fx.Node]:
    """Drop inputs of ``backward`` that it does not read: they would hold their memory to its end.

    Args:
        backward: edited in place.
        saved: values of the forward, and the inputs that receive them.

    Returns:
        The values of the other inputs, which the forward must save.
    """
    pairs = list(saved)
    read = [value for value, node in pairs if node.users]
    for _, node in pairs:
        if not node.users:
            backward.drop(node)
    return read


def copy_module(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a copy for separate editing, and its node for each node of ``module``; constants and fakes are shared.

    Its code is generated at its first call, if there is one: torch keeps the text of generated code for good.
    """
    (output,) = module.graph.find_nodes(op="output")
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    made.output(made.graph_copy(module.graph, copies)).meta.update(output.meta)
    for copy in copies.values():
        if (state := state_of(copy)) is not None:
            copy.meta[STATE] = copies.get(state, state)  # in a backward, the forward's
    copied = LazyGraphModule(module, made)
    for name, branch in copied.named_children():  # of a `torch.cond`; Inductor edits these, too
        if isinstance(branch, fx.GraphModule):
            setattr(copied, name, copy_module(branch)[0])
    return copied, copies


def copy_graph(graph: SegmentGraph) -> SegmentGraph:
    """Return a copy that can be run and edited separately; it has no ``ops``."""
    module, copies = copy_module(graph.module)
    buffer_of = {copies[node]: buffer for node, buffer in graph.buffer_of.items()}
    return SegmentGraph(module, graph.phase, graph.num_user_outputs, buffer_of=buffer_of)


def with_op_marks(
    compile_graph: Callable[[fx.GraphModule], _Code], graph: SegmentGraph, begin_op: Callable[[], None]
) -> _Code:
    """Return what ``compile_graph`` makes of ``graph``, with a call of ``begin_op`` before each op except the first.

    The calls are erased again: a copy with them would take 10 KiB per op in the step that is measured.
    """
    nodes, marks = set(graph.fx_graph.nodes), list[fx.Node]()
    following = graph.output
    for op in reversed(graph.ops[1:]):
        following = op if op in nodes else following  # the rewriter drops unused reads of RNG states
        marks.append(_insert_call(graph, following, begin_op))
    try:
        return compile_graph(graph.module)
    finally:
        for mark in marks:
            graph.fx_graph.erase_node(mark)


def insert_before(graph: SegmentGraph, ops: Collection[int], function: Callable[[], None]) -> None:
    """Insert a call of ``function`` before each of ``ops``, indices into ``graph.ops``."""
    for op in ops:
        _insert_call(graph, graph.ops[op], function)


def _insert_call(graph: SegmentGraph, following: fx.Node, function: Callable[[], None]) -> fx.Node:
    with graph.fx_graph.inserting_before(following):
        return graph.fx_graph.call_function(function)


def is_projection(node: fx.Node) -> bool:
    """Return whether ``node`` only selects one tensor of an op's tuple; it is part of that op."""
    return node.op == "call_function" and node.target is operator.getitem


def value_of(node: fx.Node) -> Any:
    """Return the traced value of ``node``, or else what it names: a constant, or the graph of a higher-order op."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    return fixed_number(node) if is_symbolic(value) else value


def is_whole(value: fx.Node) -> bool:
    """Return whether ``value``, as traced, covers each byte of its storage exactly once, whatever its size."""
    tensor = value.meta["val"]
    count = 1  # of contiguous elements
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride == count:
            count *= size
    is_dense = count == tensor.numel() and count * tensor.element_size() == tensor.untyped_storage().nbytes()
    return bool(is_dense and covers_storage(value))


def gather_projections(graph: fx.Graph) -> None:
    """Move each selection from a tuple to just after its op, so that the tuple does not keep other members alive."""
    for node in [node for node in graph.nodes if is_projection(node)]:
        producer = node.args[0]
        if isinstance(producer, fx.Node):
            producer.append(node)


class _Direct:
    """Placeholder of an operator while code is generated that calls it without torch's Python wrapper.

    For tensors of 128 values that saves 0.5 of 2.8 us per call (600 in a row; AMD EPYC, torch 2.13).
    """

    def __init__(self, operator: OpOverload[..., Any]) -> None:
        self.__module__, self.__name__ = __name__, str(operator).replace(".", "_")
        self.function = direct_call(operator)

    def __call__(self, *_: object, **__: object) -> object:
        raise AssertionError(f"{self.__name__} is a placeholder of an operator")


def compile_boxed(module: fx.GraphModule) -> BoxedFunction:
    """Compile ``module`` to a function of one list, which it empties, so that inputs are freed at their last use.

    The function holds the constants of ``module``, but neither its graph nor the text of the code.
    """
    targets = {node: node.target for node in module.graph.nodes}
    called = {target for target in targets.values() if type(target) is OpOverload}
    called_by: dict[object, Callable[..., Any]] = {operator: _Direct(operator) for operator in called} | COPIES
    for node, target in targets.items():
        node.target = called_by.get(target, target)
    module.graph.set_codegen(BoxedCodeGen())
    code = module.graph.python_code("self")
    for node, target in targets.items():
        node.target = target
    names = dict(code.globals)
    exec(compile(code.src, "<eval_with_key>", "exec", dont_inherit=True), names)  # as torch names fx's code
    forward = names.pop("forward")
    forward.__globals__.update({name: value.function for name, value in names.items() if isinstance(value, _Direct)})
    named = {str(node.target).partition(".")[0] for node in module.graph.find_nodes(op="get_attr")}
    return MethodType(forward, SimpleNamespace(**{name: getattr(module, name) for name in named}))


def is_captured(function: Any) -> bool:
    """Return whether ``function``, an autograd node or None, is the one that AOTAutograd creates for a graph."""
    return function is not None and function.name().endswith("CompiledFunctionBackward")


def captured_node(output: Any, ends: Collection[Any] = ()) -> Any:
    """Return the autograd node of the captured graph that ``output`` comes from, also through views; None if none.

    Args:
        output: a result of the region; any object.
        ends: autograd nodes of the region's inputs, at which the search ends.
    """
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    for _ in range(_MAX_VIEWS):
        if node is None or node in ends:
            return None
        if is_captured(node):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None
