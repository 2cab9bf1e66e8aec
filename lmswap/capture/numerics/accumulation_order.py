"""Detects gradients whose order of accumulation differs from eager mode, as rounding does then.

Eager mode computes ``(elsewhere + first use) + second use``, a graph ``elsewhere + (first use + second use)``. Outputs
that share memory are recreated by torch outside a graph, where autograd adds their gradients before the graph adds
others. Both follow from AOTAutograd's design (torch 2.13; no upstream issue known).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from lmswap.capture.numerics.gradient_gate import Edge
from lmswap.capture.numerics.gradient_order import receiver_of
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.runtime.partial_backward import PartialResults, Results
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.autograd import current_graph_task_id, current_node, hooks_before_accumulation
from lmswap.torch_compat.tensors import tensor_id, version_of

VIEWS = (
    f"{ROUNDED_OTHERWISE}: a graph returns several views of one tensor, whose gradients are added before those of "
    "its uses in the model; plain torch adds one after another; return clones of all but one to match it bitwise"
)
_Sum = int | tuple[Any, ...]  # one gradient, or several in the order in which they are added


class AccumulationWatch:
    """Watches the gradients that a backward graph accumulates from several uses, for others added to them."""

    def __init__(self, backward: fx.Graph, tensors: Sequence[int], note: Callable[[str], None]) -> None:
        """Prepare for a graph.

        Args:
            backward: the graph.
            tensors: positions of the region's inputs that are tensors; autograd has edges for no others.
            note: gets a sentence for the report at the first such case.
        """
        (output,) = backward.find_nodes(op="output")
        sums = {position for position, result in enumerate(output.args[0]) if _is_sum(result)}
        self._edges = {position: edge for edge, position in enumerate(tensors) if position in sums}
        self._note = note
        self._is_reported = False
        self._handles: dict[int, RemovableHandle] = {}  # by position; a backward may not reach some nodes

    def watch(self, partial_results: PartialResults) -> PartialResults:
        """Return ``partial_results``, yielded by the region's node that autograd runs now, unchanged."""
        if self._is_reported or not self._edges:
            return partial_results
        node: Any = current_node()
        edges: dict[int, Edge] = {position: node.next_functions[edge] for position, edge in self._edges.items()}

        def look(given: Results) -> Results:
            for position in given.keys() & edges.keys():
                self._expect(edges[position], position, given[position])
            return given

        return map(look, partial_results)  # holds none of the gradients

    def _expect(self, edge: Edge, position: int, gradient: Tensor | None) -> None:
        """Check what ``edge`` gets in this backward: ``gradient`` alone, or with others added."""
        if gradient is None:
            return
        node, number = receiver_of(edge, gradient.shape)
        if node is None or _is_hooked(node):
            return
        passed, shape, backward = _identity(gradient), tuple(gradient.shape), current_graph_task_id()
        if position in self._handles:
            self._handles[position].remove()

        def arrives(arrived: tuple[Tensor | None, ...]) -> None:
            handle.remove()
            found = arrived[number]
            is_another = backward != current_graph_task_id()
            if self._is_reported or is_another or found is None or _identity(found) == passed:
                return
            self._is_reported = True
            self._note(
                f"{ROUNDED_OTHERWISE}: a graph uses a tensor of {list(shape)} several times and adds those gradients "
                "before others, as of a penalty on tied weights; plain torch adds one after another"
            )

        disable: Callable[..., Any] = torch.compiler.disable  # a model may run a backward where Dynamo traces it
        handle = self._handles[position] = node.register_prehook(disable(arrives))


def reorders_view_gradients(joint: fx.Graph, num_outputs: int) -> bool:
    """Return whether eager mode adds gradients of the forward's ``num_outputs`` outputs in another order."""
    (output,) = joint.find_nodes(op="output")
    returned = output.args[0][:num_outputs]
    descriptions = output.meta.get("desc") or [None] * num_outputs
    outputs = {
        node: position
        for position, (node, description) in enumerate(zip(returned, descriptions, strict=False))
        if not hasattr(description, "base_of")  # returned for the views alone
    }
    uses = _AccumulationOrder(joint, set(filter(_has_gradient, returned)), outputs)
    bases = (node for node in dict.fromkeys(returned) if _has_gradient(node) and not _is_view_op(node))
    return any(uses.in_eager_order(base) != uses.in_captured_order(base) for base in bases if base.op != "placeholder")


class _AccumulationOrder:
    """The order of accumulation of a tensor's uses in a joint graph: autograd's, the newest first."""

    def __init__(self, joint: fx.Graph, returned: set[fx.Node], outputs: dict[fx.Node, int]) -> None:
        """``outputs``: number of each output that the model returns; ``returned``: all nodes that the graph returns."""
        self._outputs, self._number = outputs, {node: number for number, node in enumerate(joint.nodes)}
        self._is_trained: set[fx.Node] = set()  # from what is returned
        for node in reversed(joint.nodes):
            if node in returned or (_has_gradient(node) and not self._is_trained.isdisjoint(node.users)):
                self._is_trained.add(node)

    def in_eager_order(self, base: fx.Node) -> _Sum | None:
        """Return the terms in the order of eager mode.

        An output's own gradient is first; a view accumulates its gradients before it passes them on.
        """
        uses = (self.in_eager_order(use) if _is_view_op(use) else self._number[use] for use in self._uses_of(base))
        return _in_sequence([*self._own(base), *uses])

    def in_captured_order(self, base: fx.Node) -> _Sum | None:
        """Return the terms in the order of a region, whose outputs that are views autograd recreates from ``base``."""
        return _in_sequence([*self._own(base), *sorted(self._views(base)), *self._inside(base)])

    def _own(self, node: fx.Node) -> list[int]:
        """Return the number of the gradient from outside, if the model returns ``node``: before those of all uses."""
        return [-1 - self._outputs[node]] if node in self._outputs else []

    def _inside(self, base: fx.Node) -> Iterable[_Sum | None]:
        return (
            _in_sequence([*self._inside(use)]) if _is_view_op(use) else self._number[use] for use in self._uses_of(base)
        )

    def _views(self, base: fx.Node) -> Iterable[int]:
        for view in filter(_is_view_op, self._uses_of(base)):
            yield from self._own(view)
            yield from self._views(view)

    def _uses_of(self, node: fx.Node) -> list[fx.Node]:
        return sorted(self._is_trained & node.users.keys(), key=lambda use: -self._number[use])


def _in_sequence(terms: Iterable[_Sum | None]) -> _Sum | None:
    """Return the sum of ``terms`` from left to right; sums that round alike are equal."""
    found = [term for term in terms if term is not None]
    first = sorted(found[:2], key=lambda term: (isinstance(term, int), str(term)))  # addition of two commutes
    if len(found) < 2:
        return found[0] if found else None
    if isinstance(first[0], tuple) and isinstance(first[1], int):
        return (*first[0], first[1], *found[2:])
    return (*first, *found[2:])


def _is_view_op(node: fx.Node) -> bool:
    """Return whether ``node`` is a view of its input, as one tensor: torch keeps the pieces of `chunk` as they are."""
    return bool(getattr(node.target, "is_view", False)) and isinstance(node.meta.get("val"), Tensor)


def _has_gradient(result: Any) -> bool:
    """Return whether a gradient passes through ``result``."""
    if not isinstance(result, fx.Node) or result.target is torch.ops.aten.detach.default:
        return False
    made = result.meta.get("val")
    return not isinstance(made, Tensor) or made.is_floating_point() or made.is_complex()


def _is_sum(result: Any) -> bool:
    return isinstance(result, fx.Node) and result.target is torch.ops.aten.add.Tensor


def _is_hooked(node: Any) -> bool:
    """Return whether hooks of the parameter that ``node`` accumulates into may replace the sum."""
    variable = getattr(node, "variable", None)
    return variable is not None and bool(hooks_before_accumulation(variable))


def _identity(gradient: Tensor) -> tuple[int, int]:
    """Return an identity that changes by addition, in place or not."""
    return gradient.data_ptr() if has_plain_storage(gradient) else tensor_id(gradient), version_of(gradient)
