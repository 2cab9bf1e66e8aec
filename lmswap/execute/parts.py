"""How does a backward hand gradients over while it is still at work? It is cut behind them, and runs part by part.

graph   ops … │ ops … │ ops …    │ is a mark: some gradients are made, and nothing reads their memory again
parts   gradients ──► gradients ──► the rest; what later ones read goes from part to part
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from lmswap.errors import OptionError
from lmswap.execute.graph import BoxedFunction, SegmentGraph, compile_boxed, is_projection

_Given = TypeVar("_Given")

Results = dict[int, Any]  # of a backward, by position
Handing = Iterator[Results]  # as they are made
Around = Callable[[], AbstractContextManager[None]]
Backward = Callable[[list[Any]], Handing]  # it empties the list that it is called with; so do
Parts = Callable[[list[Any], Around], Handing]

# A cut costs the host some 50 µs. DistributedDataParallel reduces 1 MiB first, and then 25 MiB at a time.
_LEAST_BYTES, _MOST_PARTS = 2**20, 32


def hand_over(*_: Any) -> None:
    """The mark: these results of the graph can be handed over here."""
    raise AssertionError("a backward that hands over is run in parts")


torch.fx.node.has_side_effect(hand_over)  # dead-code elimination must leave it alone


def part_bytes(nbytes: int) -> int:
    """Of ``nbytes`` of results, how many are made before they are handed over."""
    return max(_LEAST_BYTES, nbytes // _MOST_PARTS)


def mark_hand_overs(graph: SegmentGraph) -> None:
    """Puts marks into a backward graph, each behind the op that completes enough of its results."""
    complete = _complete(graph)
    sizes = {result: result.meta["val"].nbytes for results in complete.values() for result in results}
    enough = part_bytes(sum(sizes.values()))
    waiting: list[fx.Node] = []
    for node in list(graph.module.graph.nodes):
        waiting += complete.get(node, ())
        if sum(sizes[result] for result in waiting) >= enough:
            with graph.module.graph.inserting_after(node):
                graph.module.graph.call_function(hand_over, tuple(waiting))
            waiting = []


def results_by_part(graph: fx.Graph) -> list[list[int]]:
    """The positions, among the results of ``graph``, of those that each of its parts gives."""
    (output,) = graph.find_nodes(op="output")
    part_of = {result: part for part, mark in enumerate(_marks(graph)) for result in mark.all_input_nodes}
    positions: list[list[int]] = [[] for _ in range(len(_marks(graph)) + 1)]
    for position, result in enumerate(output.args[0]):
        positions[part_of.get(result, -1)].append(position)
    return positions


def compile_parts(
    module: fx.GraphModule, compile_part: Callable[[fx.GraphModule], BoxedFunction] = compile_boxed
) -> Parts:
    """Compiles ``module`` to functions that run one after another, each of them within a context of its own."""
    positions = results_by_part(module.graph)
    functions = [compile_part(part) for part in _split(module)]

    def run(values: list[Any], around: Around) -> Handing:
        for function, given in zip(functions, positions, strict=True):
            with around():
                values[:] = function(values)
            yield {position: values.pop(0) for position in given}  # nothing of it is held here

    return run


class AtWork:
    """A backward that has begun, and gives its results part by part: one thread's at a time.

    Raises OptionError from each of its methods while a part runs in another thread.
    """

    def __init__(self, model: str, parts: Generator[Results, None, None]) -> None:
        self._model, self._parts = model, parts
        self._early: deque[Results] = deque()

    def __iter__(self) -> Handing:
        return self

    def __next__(self) -> Results:
        return self._early.popleft() if self._early else self._alone(self._parts.__next__)

    def finish(self) -> None:
        """Runs the rest now; what it gives is kept for who asks."""
        self._alone(partial(self._early.extend, self._parts))

    def close(self) -> None:
        """Ends it where it is: nobody will ask for the rest."""
        self._alone(self._parts.close)
        self._early.clear()

    def _alone(self, run: Callable[[], _Given]) -> _Given:
        """What ``run``, a method of the generator's, gives; CPython itself checks that no other thread is in one."""
        try:
            return run()
        except ValueError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the code of a part
            raise OptionError(
                f"{self._model} was called while its backward runs in another thread; an enabled model is for one "
                "thread at a time: take turns, or call a copy there (copy.deepcopy gives a plain one)"
            ) from error


class Backwards:
    """The backwards of one model that are at work."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._at_work: list[weakref.ref[AtWork]] = []  # no set with callbacks, in which interrupts are lost

    def add(self, parts: Generator[Results, None, None]) -> AtWork:
        """A backward of these parts begins."""
        backward = AtWork(self._model, parts)
        self._at_work.append(weakref.ref(backward))
        return backward

    def end(self) -> None:
        """One segment runs at a time: if a hook calls the model, the backward that is at work goes first.

        Raises:
            OptionError: it runs in another thread.
        """
        for backward in filter(None, [reference() for reference in self._at_work]):
            if torch._C._current_graph_task_id() >= 0:
                backward.finish()
            else:  # autograd is not in it any more: an exception cut it short
                backward.close()
        self._at_work.clear()


def at_once(function: BoxedFunction) -> Backward:
    """A backward that gives everything together."""
    return lambda arguments: iter([dict(enumerate(function(arguments)))])


def all_of(handing: Iterable[Results]) -> list[Any]:
    """Runs a backward to its end; everything it gives, in order."""
    made: Results = {}
    for given in handing:
        made |= given
    return [made[position] for position in range(len(made))]


def _marks(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=hand_over)


def _complete(graph: SegmentGraph) -> dict[fx.Node, list[fx.Node]]:
    """By node behind which they can be handed over: results in memory that the graph makes and then leaves alone."""
    (output,) = graph.module.graph.find_nodes(op="output")
    last: dict[int, fx.Node] = {}  # by buffer: what reads or shows it last
    given = {graph.buffer_of.get(node) for node in graph.module.graph.find_nodes(op="placeholder")}
    for node in graph.module.graph.nodes:
        for shown in (node, *node.all_input_nodes):
            if shown in graph.buffer_of and node is not output:
                last[graph.buffer_of[shown]] = node
    complete: dict[fx.Node, list[fx.Node]] = {}
    for result in dict.fromkeys(output.all_input_nodes):
        buffer = graph.buffer_of.get(result)
        if buffer is not None and buffer not in given and isinstance(result.meta.get("val"), Tensor):
            complete.setdefault(_behind_picks(last[buffer]), []).append(result)
    return complete


def _behind_picks(node: fx.Node) -> fx.Node:
    """Where nothing picks any more from the op's tuple, which would hold what is handed over."""
    while is_projection(node.next):
        node = node.next
    return node


def _split(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The parts of ``module``: each takes what the one before returned behind the results that it gives."""
    (output,) = module.graph.find_nodes(op="output")
    ends = [*_marks(module.graph), output]
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
    """The graph of ``ops``, whose inputs are ``taken`` and whose results ``given``."""
    part, copies = fx.Graph(), dict[Any, fx.Node]()
    for node in taken:
        copies[node] = part.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in ops:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies.get(node) for node in given))
    return fx.GraphModule(module, part)
