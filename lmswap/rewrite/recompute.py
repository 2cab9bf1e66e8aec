"""Insertion of recomputes into fx graphs: program + recomputes + graphs → the schedule, and graphs that run it.

A recompute is a copy of the op's node. Later readers of its buffers read the copy; other views of a buffer are rebuilt
from the copy's bytes. A value of the forward graph that a recompute in the backward needs is added to the saved
outputs; saved values that are no longer read are dropped, which frees their memory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from lmswap.errors import PlanInvalid
from lmswap.ir.plan import Recompute
from lmswap.ir.program import Program
from lmswap.ir.schedule import Schedule, schedule
from lmswap.rewrite.views import geometry, users_from, view_of
from lmswap.runtime.codegen import SegmentGraph, drop_unread, first_op, is_projection, is_whole, pass_sizes
from lmswap.runtime.rng import recompute_random, state_of
from lmswap.torch_compat.sized_graphs import SizeNodes, symbolic_value
from lmswap.torch_compat.symbolic_sizes import is_size


def insert_recomputes(
    program: Program, graphs: Sequence[SegmentGraph], recomputes: Sequence[Recompute]
) -> tuple[Schedule, tuple[SegmentGraph, ...]]:
    """Edit ``graphs`` in place so that they carry out ``recomputes``.

    Args:
        program: the planned step.
        graphs: the graphs of its segments, in order.
        recomputes: in order of execution.

    Returns:
        The schedule, and the graphs with its numbers of ops and buffers.

    Raises:
        PlanInvalid: a recompute needs a value that the graphs cannot pass to it.
    """
    runs = schedule(program, recomputes)
    if not recomputes:
        return runs, tuple(graphs)
    due: dict[int, list[int]] = defaultdict(list)
    for recompute in recomputes:
        due[recompute.position].append(recompute.op)
    pass_sizes(graphs)
    nodes = [node for graph in graphs for node in graph.ops]
    values = _Values(program, itertools.count(len(program.buffers)))
    editors: list[_RecomputeInserter] = []
    for segment, graph in zip(program.segments, graphs, strict=True):
        editor = _RecomputeInserter(graph, values, editors[-1] if editors else None)
        for position in range(segment.start, segment.stop):
            for op in due[position]:
                editor.recompute(nodes[op], program.ops[op].writes, before=nodes[position])
            editor.run(nodes[position])
        editors.append(editor)
    for editor in editors:
        editor.finish()
    return runs, tuple(editor.graph for editor in editors)


@dataclass
class _Values:
    """State shared by all editors. The node that first made a value identifies it; buffers are the program's."""

    program: Program
    recomputed: Iterator[int]  # numbers for the schedule's buffers, in order of execution
    buffer_of: dict[fx.Node, int] = field(default_factory=dict)  # of values
    value_of: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of nodes of all graphs


class _RecomputeInserter:
    """Editor of one graph, in order of execution."""

    def __init__(self, graph: SegmentGraph, values: _Values, forward: _RecomputeInserter | None) -> None:
        self.graph = SegmentGraph(graph.module, graph.phase, graph.num_user_outputs)
        self._fx, self._values, self._forward = self.graph.fx_graph, values, forward
        self._sizes = SizeNodes(self._fx)
        # By buffer of the planned program: the buffer of the schedule with its current bytes.
        self._newest: list[int] = list(forward._newest) if forward else list(range(len(values.program.buffers)))
        self._now: dict[fx.Node, fx.Node] = {}  # value -> the node of this graph with its current version
        self._nodes: dict[int, list[fx.Node]] = defaultdict(list)  # by buffer: all nodes of its values so far
        self._storage: dict[int, fx.Node] = {}  # a node that holds a buffer's bytes, from which views are built
        inputs = self.graph.inputs
        self._saved = list(zip(forward.graph.saved, inputs, strict=False)) if forward else []
        brought = {node: value for value, node in self._saved}
        for node, buffer in graph.buffer_of.items():
            values.buffer_of.setdefault(brought.get(node, node), buffer)
        for node in (*inputs, *self._fx.find_nodes(op="get_attr")):
            self._record(node, brought.get(node, node))

    def run(self, node: fx.Node) -> None:
        """Record the first run of an op."""
        self.graph.ops.append(node)
        for made in (node, *filter(is_projection, node.users)):
            self._record(made, made)

    def recompute(self, node: fx.Node, writes: Sequence[int], *, before: fx.Node) -> None:
        """Copy an op of this graph or the forward one to ``before``, and redirect later readers to the copy.

        Args:
            node: the op.
            writes: the buffers of the program that it writes.
            before: a node of this graph.

        Raises:
            PlanInvalid: an input of the op is not available in this graph, and no forward can save it.
        """
        inputs = {given: self.find(self._values.value_of.get(given, given)) for given in node.all_input_nodes}
        with self._fx.inserting_before(before):
            copies = {node: self._copy(node, inputs)}
            for pick in filter(is_projection, node.users):
                copies[pick] = self._fx.node_copy(pick, copies.__getitem__)
        self.graph.ops.append(copies[node])
        stale = [old for buffer in writes for old in self._nodes[buffer]]
        for old in stale:
            self._now.pop(self._values.value_of[old], None)
        for buffer in writes:
            self._newest[buffer] = next(self._values.recomputed)
        for value, copy in copies.items():
            self._record(copy, value)
            if self._values.buffer_of.get(value) in writes:
                self._storage[self._values.buffer_of[value]] = copy
        for old in stale:
            for user in users_from(old, before):
                if user.op != "output":  # returned values are the first run's; saved outputs follow at the end
                    user.replace_input_with(old, self.find(self._values.value_of[old]))

    def _copy(self, node: fx.Node, inputs: Mapping[fx.Node, fx.Node]) -> fx.Node:
        state = state_of(node)
        if state is None:
            return self._fx.node_copy(node, inputs.__getitem__)
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        drawn: Any = (self.find(state), state.args[0], node.target, *cast(Any, args))
        copy: fx.Node = self._fx.call_function(recompute_random, drawn, kwargs)
        copy.meta.update(node.meta)
        return copy

    def find(self, value: fx.Node) -> fx.Node:
        """Return the node of this graph with the current ``value``; save it in the forward, or build a view, if needed.

        Raises:
            PlanInvalid: it is not available in this graph, and no forward can save it.
        """
        buffer = self._values.buffer_of.get(value)
        if buffer is None and value.graph is self._fx:
            return value  # not a tensor
        if buffer is None and is_size(size := symbolic_value(value)):
            found: fx.Node = self._sizes.of(size)
            return found
        if value not in self._now and buffer not in self._storage:
            self._save_in_forward(value)
        if value not in self._now:
            assert buffer is not None
            storage = self._storage[buffer]
            if geometry(storage) == geometry(value):  # unchanged: some operators return other dtypes than were traced
                return storage
            # Directly after the allocation, so that swaps of the buffer find the view among its other values.
            behind = first_op(self._fx) if storage.op == "placeholder" else None
            with self._fx.inserting_before(behind) if behind else self._fx.inserting_after(storage):
                self._record(view_of(storage, value, self._sizes), value)
        return self._now[value]

    def finish(self) -> None:
        """Make the forward graph save exactly what this one reads."""
        if self._forward:
            forward = self._forward
            forward.graph.save([forward.find(value) for value in drop_unread(self.graph, self._saved)])
        self._fx.lint()

    def _save_in_forward(self, value: fx.Node) -> None:
        if self._forward is None or value not in self._values.buffer_of:
            raise PlanInvalid("saved values", f"'{value.name}' is not available in the {self.graph.phase} graph")
        node = self.graph.take(value)
        # Tensors whose version counter autograd does not check come last; this one comes first, and is checked.
        value.meta.pop("saved_tensor_with_no_vc_check", None)
        self._saved.insert(0, (value, node))
        self._record(node, value)

    def _record(self, node: fx.Node, value: fx.Node) -> None:
        """Record that ``node`` has the current ``value``, if that is a tensor."""
        buffer = self._values.buffer_of.get(value)
        if buffer is None:
            return
        self._values.value_of[node], self._now[value] = value, node
        self._nodes[buffer].append(node)
        self.graph.buffer_of[node] = self._newest[buffer]
        if node.op == "placeholder" and is_whole(node) and not self._values.program.buffers[buffer].is_resident:
            self._storage.setdefault(buffer, node)
