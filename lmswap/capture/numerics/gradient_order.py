"""Makes captured backwards deliver parameter gradients in eager order, and as early as others use them.

Autograd processes the gradients of a captured backward in the order of the forward's inputs (torch 2.13;
pytorch#144376, for which pytorch#177683 and pytorch#186007 were not merged). Hooks of parameters may use random
numbers or step an optimizer, and DistributedDataParallel fills its buckets in the order of the first step: the rounding
of an all-reduce over more than two processes depends on a number's position in its bucket. So gradients are delivered
in eager order: it is read from the region's autograd graph at trace time, and enforced by identity nodes, the last of
which runs first. Where processes all-reduce gradients, or they are added to those of earlier steps, each part of the
backward has a gate for its gradients, so that they are reduced while the next part computes, or added and freed before
it does; see `lmswap.capture.numerics.gradient_gate`.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from lmswap.capture.numerics.gradient_gate import Edge, insert_gate, skip_gate
from lmswap.torch_compat.autograd import hooks_after_accumulation, hooks_before_accumulation, sequence_number
from lmswap.torch_compat.process_groups import is_distributed


def receiver_of(edge: Edge, shape: torch.Size) -> Edge:
    """Return the node that takes a gradient of ``shape`` from ``edge``, after the nodes inserted by `GradientOrder`."""
    node, number = skip_gate(edge)
    if node is not None and node.name() == "ExpandBackward0":
        (following, _), *_ = node.next_functions
        if getattr(getattr(following, "variable", None), "shape", None) == shape:
            return following, 0
    return node, number


class GradientOrder:
    """The order in which the gradients of one region's inputs are complete."""

    def __init__(self) -> None:
        self._order: Sequence[int] = ()
        self.tensors: Sequence[int] = ()  # the inputs that are tensors
        self._parts: list[list[int]] = []  # by part of the backward: the inputs whose gradients it completes

    def instrument(self, module: fx.GraphModule) -> None:
        """Edit Dynamo's graph of the region so that running it during the trace records the order."""
        (output,) = module.graph.find_nodes(op="output")
        inputs = module.graph.find_nodes(op="placeholder")
        with module.graph.inserting_before(output):
            module.graph.call_function(self._traced, (output.args[0], tuple(inputs)))

    def set_parts(self, parts: list[list[int]]) -> None:
        """Set, by part of the region's backward, the inputs whose gradients it completes."""
        self._parts = parts

    def disable_parts(self) -> None:
        """Deliver all gradients at the end: the output of a gate cannot be written in place."""
        self._parts = []

    def reorder_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the region's real ``inputs``, wrapped so that gradients arrive in that order."""
        if not (self._order and torch.is_grad_enabled()):
            return inputs
        are_all = len(self.tensors) == len(inputs)
        given_tensors = inputs if are_all else [inputs[position] for position in self.tensors]
        if len(self._parts) <= 1 and not _any_has_hooks(given_tensors) and not is_distributed():
            return inputs
        given = list(inputs)
        groups = self._groups(
            [position for position, value in enumerate(given) if isinstance(value, Tensor) and value.requires_grad]
        )
        for positions in reversed(groups):
            for position in reversed(positions):
                if given[position].is_leaf:
                    given[position] = given[position].expand_as(given[position])  # an identity for its gradient
            if len(groups) > 1:
                for position, value in zip(positions, insert_gate([given[p] for p in positions]), strict=True):
                    given[position] = value
        return given

    def _groups(self, positions: Sequence[int]) -> list[list[int]]:
        """Return ``positions`` in order, grouped by arrival, so that none waits for a later one."""
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
        self.tensors = [position for position, value in enumerate(inputs) if isinstance(value, Tensor)]
        for position, value in enumerate(inputs):
            if (node := _grad_fn(value)) is not None:
                positions[node].append(position)
        ran = _autograd_order(filter(None, map(_grad_fn, outputs)), positions.keys())
        self._order = [position for node in ran for position in positions[node]]


def _grad_fn(value: Any) -> Node | None:
    return value.grad_fn if isinstance(value, Tensor) else None


def _any_has_hooks(tensors: Sequence[Tensor]) -> bool:
    """Return whether hooks get the gradient of one of these tensors, before or after accumulation."""
    return any(map(hooks_before_accumulation, tensors)) or any(map(hooks_after_accumulation, tensors))


def _autograd_order(roots: Iterable[Node], leaves: Iterable[Node]) -> list[Node]:
    """Return ``leaves`` in the order in which autograd reaches them from ``roots``.

    Leaves run as soon as they are ready, of other nodes the newest first.
    """
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
        newest = 2**64 if node in leaves else sequence_number(node)
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
