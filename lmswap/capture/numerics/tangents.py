"""Tangents, the gradients that enter a backward, where they differ from what torch guessed when it traced.

torch guesses that the gradient of each output exists and has the output's layout, and makes zeros and copies where that
is wrong (torch 2.13; pytorch#144579); other kernels then run than in eager mode, or round in another order. Here they
are used as they arrive: a sum's gradient is one number with strides of 0, and that of an output that no loss reads does
not exist.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from lmswap.capture.interrupts import raise_interrupt
from lmswap.capture.numerics.correct_metadata import OutputMetadata, retrace
from lmswap.runtime import ops
from lmswap.runtime.codegen import is_whole
from lmswap.runtime.partial_backward import Backward, PartialResults
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.aot_autograd import tangents
from lmswap.torch_compat.autograd import is_any_autocast_enabled
from lmswap.torch_compat.pytree import tensors
from lmswap.torch_compat.sized_graphs import value_meta
from lmswap.torch_compat.tensors import suggest_memory_format
from lmswap.torch_compat.traced_layouts import TracedLayouts, dimension_order, strides_of

_log = logging.getLogger(__name__)
# Operators whose backward formula makes this argument, a gradient, contiguous.
_MADE_CONTIGUOUS = {
    torch.ops.aten.native_group_norm_backward.default: 0,
    torch.ops.aten._cdist_backward.default: 0,
    torch.ops.aten._weight_norm_interface_backward.default: 0,
}
_MOVERS = (ops.swap_out_start, ops.view_bytes)

COPIED = (
    "gradients entered a backward in a layout that its plan does not allow: they were copied to that of the "
    "model's outputs, which plain torch does not do, and results may differ by rounding"
)
CAST = (
    "a backward began under autocast, where plain torch casts its products and graphs do not: results may differ from "
    "plain torch's by rounding; leave autocast before backward(), as torch advises"
)


def restore_layout_ops(joint: fx.Graph) -> None:
    """Restore ops of eager mode's backward that a trace omits where a tangent's layout makes them no-ops."""
    reached = set(tangents(joint))
    tangent_views = set(reached)  # tangents, and views of them
    for node in list(joint.nodes):
        if reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        if getattr(node.target, "is_view", False) and not tangent_views.isdisjoint(node.all_input_nodes):
            tangent_views.add(node)
        position = _MADE_CONTIGUOUS.get(node.target)
        if position is not None and node.args[position] in tangent_views:
            _make_contiguous(joint, node, position)


def refresh_tangent_strides(joint: fx.Graph) -> set[fx.Node]:
    """Set tangents' strides to those of the outputs corrected by `retrace`; return the tangents that changed."""
    (output,) = joint.find_nodes(op="output")
    made = list(zip(output.meta.get("desc") or (), output.args[0], strict=False))
    changed = set()
    for node in tangents(joint):
        own = getattr(node.meta.get("desc"), "output", None)
        result = next((result for description, result in made if own is not None and description == own), None)
        if not isinstance(result, fx.Node) or not is_whole(result):
            continue
        fake, stride = node.meta["val"], result.meta["val"].stride()
        if fake.stride() != stride:
            with fake.fake_mode:
                node.meta["val"] = torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)
            changed.add(node)
    return changed


def _make_contiguous(joint: fx.Graph, node: fx.Node, position: int) -> None:
    """Make that argument of ``node`` contiguous in its memory format: no copy where it is."""
    gradient: Any = node.args[position]
    fake = gradient.meta["val"]
    with joint.inserting_before(node):
        laid = joint.call_function(
            torch.ops.aten.contiguous.default, (gradient,), {"memory_format": suggest_memory_format(fake)}
        )
    laid.meta.update(node.meta | value_meta(gradient))
    node.replace_input_with(gradient, laid)


class TangentAdapter:
    """Passes tangents to one backward graph as they arrive; copies them where its plan does not allow their layout."""

    def __init__(self, backward: fx.GraphModule, made: OutputMetadata, note: Callable[[str], None]) -> None:
        """Prepare for a graph as it was rewritten for its plan.

        Args:
            backward: the graph.
            made: see `lmswap.capture.numerics.correct_metadata`.
            note: reports a sentence.
        """
        self._graph, self._made, self._note = backward.graph, made, note
        inputs = backward.graph.find_nodes(op="placeholder")
        self._nodes = tangents(backward.graph)
        self._positions = [inputs.index(node) for node in self._nodes]
        self._layouts = TracedLayouts(backward.graph, self._nodes)
        self._is_planned = {self._layouts.none_differ: True}  # by differences from the traced strides
        self._depends_on_memory = _depends_on_memory(backward.graph, self._nodes)
        self._needed_tangents = _needed_tangents(backward.graph, self._nodes)
        self._arriving = threading.local()  # .present: those that exist, if not all do, until the backward takes them

    def run(self, backward: Backward, arguments: list[Any]) -> PartialResults:
        """Return what ``backward`` yields for ``arguments``; None for results of missing gradients only."""
        given = [arguments[position] for position in self._positions]
        absent = self._absent(given)
        traced = self._layouts.strides(self._layouts.sizes_of(arguments), given)
        differences = self._layouts.differences(traced, given)
        if differences not in self._is_planned:
            self._is_planned[differences] = not self._depends_on_memory and self._runs_as_planned(given)
        given.clear()  # each is freed at its last use
        if not self._is_planned[differences]:
            self._note(COPIED)
            for position, stride in zip(self._positions, traced, strict=True):
                arguments[position] = _copied_to_strides(arguments[position], stride)
        partial_results = backward(arguments)
        return map(partial(self._without, absent), partial_results) if absent else partial_results

    def _without(self, absent: set[fx.Node], given: dict[int, Any]) -> dict[int, Any]:
        return {
            position: None if self._needed_tangents[position] and self._needed_tangents[position] <= absent else result
            for position, result in given.items()
        }

    def note_arriving(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which gradients the backward that is about to run gets."""
        if is_any_autocast_enabled():
            self._note(CAST)
        # Always set: if a later hook raises, no backward takes it, and the next one must not read it.
        self._arriving.present = gradients if any(gradient is None for gradient in gradients) else None

    def _absent(self, given: Sequence[torch.Tensor]) -> set[fx.Node]:
        """Return the tangents that do not exist; torch passes zeros in their place."""
        present = self._arriving.__dict__.pop("present", None)
        if present is None:
            return set()
        pairs = zip(self._nodes, given, strict=True)
        # A user's hook may have replaced a tensor.
        return {
            node
            for node, tangent in pairs
            if not any(tangent is other for other in present) and has_plain_storage(tangent) and not tangent.any()
        }

    def _runs_as_planned(self, given: Sequence[torch.Tensor]) -> bool:
        """Return whether the graph accepts these tangents' layouts, with unchanged layouts of what the plan moves.

        Tangents of other sizes than planned for are taken for ones of these sizes with the same order of dimensions.
        """
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.graph_copy(self._graph, copies)
        for node, tangent in zip(self._nodes, given, strict=True):
            fake, stride = copies[node].meta["val"], tangent.stride()
            if tangent.shape != fake.shape:
                order = dimension_order(tangent)
                if order is None:
                    return False
                stride = strides_of(order, fake.shape)
            with fake.fake_mode:
                laid = torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)
            copies[node].meta["val"] = laid
        try:
            retrace(graph, [copies[node] for node in self._nodes], self._made)
        except Exception as error:  # an operator may refuse a layout with any error
            raise_interrupt(error)
            _log.info("a backward cannot read tangents with strides of %s: %s", [t.stride() for t in given], error)
            return False
        moved = [source for node in copies if node.target in _MOVERS for source in node.all_input_nodes]
        return all(_layout(node) == _layout(copies[node]) for node in moved)


def _depends_on_memory(backward: fx.Graph, nodes: Collection[fx.Node]) -> bool:
    """Return whether the graph accesses the memory of one of ``nodes`` independently of its strides."""
    views = set(nodes)
    for node in backward.nodes:
        if getattr(node.target, "is_view", False) and not views.isdisjoint(node.all_input_nodes):
            if node.target is torch.ops.aten.as_strided.default:
                return True
            views.add(node)
    return False


def _needed_tangents(backward: fx.Graph, nodes: Collection[fx.Node]) -> list[set[fx.Node]]:
    """Return, for each output, the tangents of ``nodes`` that it depends on."""
    needed: dict[fx.Node, set[fx.Node]] = {}
    for node in backward.nodes:
        needed[node] = {node} if node in nodes else set().union(*(needed[given] for given in node.all_input_nodes))
    (output,) = backward.find_nodes(op="output")
    return [needed[result] if isinstance(result, fx.Node) else set() for result in output.args[0]]


def _copied_to_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _layout(node: fx.Node) -> list[tuple[Any, ...]]:
    return [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
        for t in tensors(node.meta.get("val"))
    ]
