"""In which order do gradients arrive, where somebody looks at them on arrival, and how early?

Autograd takes up what a captured backward gives in an order of its own. But hooks of parameters may draw random numbers
or step an optimizer, and DistributedDataParallel fills its buckets in the order of the first step: how a sum over more
than two processes is rounded depends on where in its bucket a number lies. So gradients arrive in the order of eager
torch: it is read off the region's autograd graph when that is traced, and kept by nodes that pass gradients on, the
last of which runs first. Where processes sum them, or they are added to those of the steps before, those that a part
of the backward makes go through a gate of their own, so that they are summed while the next part computes, or are added
and let go of before it does; see `lmswap.capture.gates`.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, distributed, fx
from torch.autograd.graph import Node

from lmswap.capture.gates import End, behind_gate, pass_gate


def trains_together() -> bool:
    """Whether this process is one of several that torch.distributed has joined."""
    return distributed.is_available() and distributed.is_initialized()


def taker(end: End, shape: torch.Size) -> End:
    """Who takes a gradient of ``shape`` that a region's node gives to ``end``, behind what `Arrival` put there."""
    node, number = behind_gate(end)
    if node is not None and node.name() == "ExpandBackward0":
        (following, _), *_ = node.next_functions
        if getattr(getattr(following, "variable", None), "shape", None) == shape:
            return following, 0
    return node, number


class Arrival:
    """The order in which the gradients of one region's inputs are complete."""

    def __init__(self) -> None:
        self._order: Sequence[int] = ()
        self._parts: list[list[int]] = []  # of the backward: positions of the inputs whose gradients each completes

    def listen(self, module: fx.GraphModule) -> None:
        """Edits Dynamo's graph of the region, so that running it where it is traced tells the order."""
        (output,) = module.graph.find_nodes(op="output")
        inputs = module.graph.find_nodes(op="placeholder")
        with module.graph.inserting_before(output):
            module.graph.call_function(self._traced, (output.args[0], tuple(inputs)))

    def come_in(self, parts: list[list[int]]) -> None:
        """The region's backward completes the gradients of these inputs part by part."""
        self._parts = parts

    def come_at_once(self) -> None:
        """It cannot be asked to: what comes through a gate cannot be written into."""
        self._parts = []

    def in_order(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The region's real ``inputs``, through which gradients arrive in that order."""
        matters = trains_together() or len(self._parts) > 1 or any(map(_is_heard, inputs))
        if not (self._order and torch.is_grad_enabled() and matters):
            return inputs
        given = list(inputs)
        groups = self._groups([position for position, value in enumerate(given) if _trains(value)])
        for positions in reversed(groups):
            for position in reversed(positions):
                if given[position].is_leaf:
                    given[position] = given[position].expand_as(given[position])  # its gradient passes as it is
            if len(groups) > 1:
                for position, value in zip(positions, pass_gate([given[p] for p in positions]), strict=True):
                    given[position] = value
        return given

    def _groups(self, positions: Sequence[int]) -> list[list[int]]:
        """``positions`` in order, those together that arrive together: none waits for one that comes later."""
        part_of = {position: part for part, made in enumerate(self._parts) for position in made}
        turn = {position: turn for turn, position in enumerate(self._order)}
        groups: dict[int, list[int]] = {}
        latest = 0
        for position in sorted(positions, key=lambda position: turn.get(position, len(turn))):
            latest = max(latest, part_of.get(position, 0))
            groups.setdefault(latest, []).append(position)
        return list(groups.values())

    def _traced(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        positions = defaultdict(list)
        for position, value in enumerate(inputs):
            if (node := _made_by(value)) is not None:
                positions[node].append(position)
        ran = _run(filter(None, map(_made_by, outputs)), positions.keys())
        self._order = [position for node in ran for position in positions[node]]


def _made_by(value: Any) -> Node | None:
    return value.grad_fn if isinstance(value, Tensor) else None


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_heard(value: Any) -> bool:
    """Whether hooks are told of its gradient, before it is accumulated or after."""
    return isinstance(value, Tensor) and bool(value._backward_hooks or value._post_accumulate_grad_hooks)


def _run(roots: Iterable[Node], leaves: Iterable[Node]) -> list[Node]:
    """The ``leaves`` in the order in which autograd reaches them: at once when ready; of others, the newest is next."""
    leaves, roots = set(leaves), list(dict.fromkeys(roots))
    uses, known = Counter[Node](), list(roots)
    edges: dict[Node, list[Node]] = {}
    while known:
        node = known.pop()
        if node not in edges:
            edges[node] = [] if node in leaves else [following for following, _ in node.next_functions if following]
            uses.update(edges[node])
            known += edges[node]
    ready: list[tuple[int, int, Node]] = []
    reached, turns = [], count()

    def push(node: Node) -> None:
        newest = 2**64 if node in leaves else node._sequence_nr()
        heapq.heappush(ready, (-newest, next(turns), node))

    for root in roots:
        if not uses[root]:
            push(root)
    while ready:
        node = heapq.heappop(ready)[-1]
        reached += [node] if node in leaves else []
        for following in edges[node]:
            uses[following] -= 1
            if not uses[following]:
                push(following)
    return reached
