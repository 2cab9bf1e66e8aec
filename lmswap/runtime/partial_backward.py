"""Backward graphs that yield gradients before they end: the graph is cut at markers, and runs part by part.

graph   ops … │ ops … │ ops …    │ is a marker: some gradients are final, and no later op reads their memory
parts   gradients ──► gradients ──► the rest; values for later parts are passed from part to part
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from lmswap.errors import OptionError
from lmswap.ir.backward_parts import part_bytes
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph, compile_boxed, is_projection
from lmswap.torch_compat.autograd import current_graph_task_id
from lmswap.torch_compat.graphs import LazyGraphModule

_Given = TypeVar("_Given")

Results = dict[int, Any]  # of a backward, by position
PartialResults = Iterator[Results]  # as they are computed
Around = Callable[[], AbstractContextManager[None]]
Backward = Callable[[list[Any]], PartialResults]  # it empties the list passed; so do
Parts = Callable[[list[Any], Around], PartialResults]


def yield_marker(*_: Any) -> None:
    """Marker: these results of the graph can be returned here."""
    raise AssertionError("a backward with markers must be run in parts")


torch.fx.node.has_side_effect(yield_marker)  # dead-code elimination must leave it alone


def insert_yield_markers(graph: SegmentGraph) -> None:
    """Insert markers into a backward graph, each after an op that completes enough of its results."""
    complete = _results_by_last_use(graph)
    sizes = {result: result.meta["val"].nbytes for results in complete.values() for result in results}
    enough = part_bytes(sum(sizes.values()))
    waiting: list[fx.Node] = []
    for node in list(graph.module.graph.nodes):
        waiting += complete.get(node, ())
        if sum(sizes[result] for result in waiting) >= enough:
            with graph.module.graph.inserting_after(node):
                graph.module.graph.call_function(yield_marker, tuple(waiting))
            waiting = []


def results_by_part(graph: fx.Graph) -> list[list[int]]:
    """Return, by part, the positions of its results among those of ``graph``."""
    (output,) = graph.find_nodes(op="output")
    part_of = {result: part for part, mark in enumerate(_yield_markers(graph)) for result in mark.all_input_nodes}
    positions: list[list[int]] = [[] for _ in range(len(_yield_markers(graph)) + 1)]
    for position, result in enumerate(output.args[0]):
        positions[part_of.get(result, -1)].append(position)
    return positions


def compile_parts(
    module: fx.GraphModule, compile_part: Callable[[fx.GraphModule], BoxedFunction] = compile_boxed
) -> Parts:
    """Compile ``module`` to functions that run one after another, each in a context of its own.

    Args:
        module: a backward graph. It is not edited if it has markers; without any it is the one part.
        compile_part: compiles the graph of one part.

    Returns:
        A function of the list of inputs, which it empties, and of what returns the context of a part.
    """
    positions = results_by_part(module.graph)
    functions = [compile_part(part) for part in (_split(module) if len(positions) > 1 else (module,))]

    def run(values: list[Any], around: Around) -> PartialResults:
        for function, given in zip(functions, positions, strict=True):
            with around():
                values[:] = function(values)
            yield _take(values, given)  # no reference stays here

    return run


class BackwardRun:
    """A backward that has begun, and yields its results part by part, in one thread at a time.

    Each method raises OptionError while a part runs in another thread.
    """

    def __init__(self, model: str, parts: Generator[Results, None, None]) -> None:
        self._model, self._parts = model, parts
        self._early: deque[Results] = deque()

    def __iter__(self) -> PartialResults:
        return self

    def __next__(self) -> Results:
        return self._early.popleft() if self._early else self._alone(self._parts.__next__)

    def finish(self) -> None:
        """Run the rest now; its results are kept for the iterator."""
        self._alone(partial(self._early.extend, self._parts))

    def close(self) -> None:
        """End it where it is; the rest is never run."""
        self._alone(self._parts.close)
        self._early.clear()

    def _alone(self, run: Callable[[], _Given]) -> _Given:
        """Return what ``run``, a method of the generator, returns; CPython detects another thread inside it."""
        try:
            return run()
        except ValueError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # raised by the code of a part
            raise OptionError(
                f"{self._model} was called while its backward runs in another thread; an enabled model is for one "
                "thread at a time: take turns, or call a copy there (copy.deepcopy gives a plain one)"
            ) from error


class ActiveBackwards:
    """The backwards of one model that have begun and not ended."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._at_work: list[weakref.ref[BackwardRun]] = []  # a set's callbacks would lose interrupts

    def add(self, parts: Generator[Results, None, None]) -> BackwardRun:
        """Register a backward of these parts."""
        backward = BackwardRun(self._model, parts)
        self._at_work.append(weakref.ref(backward))
        return backward

    def end(self) -> None:
        """Run active backwards to their end first, as one segment runs at a time: a hook may call the model.

        Raises:
            OptionError: one runs in another thread.
        """
        if not self._at_work:
            return
        for backward in filter(None, [reference() for reference in self._at_work]):
            if current_graph_task_id() >= 0:
                backward.finish()
            else:  # autograd has left it: an exception ended the pass
                backward.close()
        self._at_work.clear()


def single_part(function: BoxedFunction) -> Backward:
    """Return a backward that yields all results at once."""
    return lambda arguments: iter([dict(enumerate(function(arguments)))])


def collect(partial_results: Iterable[Results]) -> list[Any]:
    """Run a backward to its end and return all results in order."""
    made: Results = {}
    for given in partial_results:
        made |= given
    return [*map(made.__getitem__, range(len(made)))]


def _take(values: list[Any], positions: Sequence[int]) -> Results:
    """Remove the results of one part from the start of ``values``."""
    taken = dict(zip(positions, values, strict=False))
    del values[: len(positions)]
    return taken


def _yield_markers(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=yield_marker)


def _results_by_last_use(graph: SegmentGraph) -> dict[fx.Node, list[fx.Node]]:
    """Return, by the node after which they can be returned: results in new memory that no later node uses."""
    (output,) = graph.module.graph.find_nodes(op="output")
    last: dict[int, fx.Node] = {}  # by buffer: its last reader or view
    given = {graph.buffer_of.get(node) for node in graph.module.graph.find_nodes(op="placeholder")}
    for node in graph.module.graph.nodes:
        for shown in (node, *node.all_input_nodes):
            if shown in graph.buffer_of and node is not output:
                last[graph.buffer_of[shown]] = node
    complete: dict[fx.Node, list[fx.Node]] = {}
    for result in dict.fromkeys(output.all_input_nodes):
        buffer = graph.buffer_of.get(result)
        if buffer is not None and buffer not in given and isinstance(result.meta.get("val"), Tensor):
            complete.setdefault(_after_projections(last[buffer]), []).append(result)
    return complete


def _after_projections(node: fx.Node) -> fx.Node:
    """Return the op's last selection from its tuple, which would keep results alive."""
    while is_projection(node.next):
        node = node.next
    return node


def _split(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the parts of ``module``: each takes what the previous one returned after its results."""
    (output,) = module.graph.find_nodes(op="output")
    ends = [*_yield_markers(module.graph), output]
    number = {node: index for index, node in enumerate(module.graph.nodes)}
    held_to = {node: max((number[user] for user in node.users), default=-1) for node in number}
    held_to |= {result: number[mark] for mark in ends[:-1] for result in mark.all_input_nodes}
    taken, rest = module.graph.find_nodes(op="placeholder"), [node for node in number if node.op != "placeholder"]
    for end, positions in zip(ends, results_by_part(module.graph), strict=True):
        ops, rest = rest[: rest.index(end)], rest[rest.index(end) + 1 :]
        kept = [node for node in (*taken, *ops) if held_to[node] > number[end]]
        yield _part(module, taken, ops, [*(output.args[0][position] for position in positions), *kept])
        taken = kept


def _part(
    module: fx.GraphModule, taken: Iterable[fx.Node], ops: Iterable[fx.Node], given: Iterable[Any]
) -> fx.GraphModule:
    """Return the graph of ``ops`` with inputs ``taken`` and results ``given``."""
    part, copies = fx.Graph(), dict[Any, fx.Node]()
    for node in taken:
        copies[node] = part.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in ops:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies.get(node) for node in given))
    return LazyGraphModule(module, part)
