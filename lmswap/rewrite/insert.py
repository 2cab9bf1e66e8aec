"""Insertion of the swap ops of a plan into fx graphs.

Each swap becomes up to four ops (lmswap.runtime.ops)::

    token = swap_out_start(x)          the copy out is queued
    swap_out_wait(token, x)            compute waits for it; x has no later use, so its memory is free from here on
    flat = swap_in_start(token)        memory is taken, the copy in is queued
    ready = swap_in_wait(flat, token)  compute waits for it; views of the buffer are rebuilt from its bytes

Between graphs the token represents the buffer: it replaces every value of that buffer among the forward's saved outputs
and the backward's inputs. Where the backward waits for a copy out that the forward has queued, one of these values is
passed along with the token, and holds the memory until then.

A weight has a host copy for good, in which the graph's own input lies; it is only copied in::

    flat = weight_in_start(weight)          memory is taken, the copy in is queued
    ready = weight_in_wait(flat, weight)    compute waits for it; views are rebuilt from its bytes

What a graph returns, or saves over a gap in which the weight is non-resident, are views of the input itself. Where the
backward reads a copy that the forward has fetched, the input is saved, too, for autograd to check its version.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from lmswap.errors import PlanInvalid
from lmswap.ir.plan import Plan, Swap, SwapAction
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.schedule import Schedule
from lmswap.rewrite.views import alias_of, geometry, sized_geometry, users_from, view_of
from lmswap.runtime import ops
from lmswap.runtime.codegen import SegmentGraph, drop_unread, is_whole, pass_sizes
from lmswap.torch_compat.sized_graphs import SizeNodes


@dataclass(frozen=True, order=True)
class _SwapEvent:
    position: int
    kind: SwapAction
    number: int  # index of the swap in the plan


def insert_swaps(
    runs: Schedule, graphs: Sequence[SegmentGraph], plan: Plan, *, engine: int, first_buffer: int = 0
) -> None:
    """Insert the swap ops of ``plan`` into ``graphs``, in place.

    Args:
        runs: the plan's schedule; ``graphs`` are the graphs of its segments, in order.
        graphs: edited in place.
        plan: a verified plan.
        engine: the number of the engine that will carry the swaps out.
        first_buffer: id of buffer 0 in the records: its number in the step that the graphs are part of. A recomputed
            buffer has the id of the one that it replaces.

    Raises:
        PlanInvalid: the graphs do not match the plan: a value is not saved, or is read while it is swapped out.
    """
    pass_sizes(graphs)
    names = tuple(first_buffer + buffer for buffer in runs.buffers)
    editors = [_SwapInserter(graph, plan, engine, names) for graph in graphs]
    program, segments = runs.program, runs.program.segments
    actions: list[list[_SwapEvent]] = [[] for _ in segments]
    last_uses = _last_uses(program, plan)
    for number, swap in enumerate(plan.swaps):
        before = segments.index(program.segment_of(last_uses[number]))
        after = segments.index(program.segment_of(swap.first_use % len(program.ops)))
        if program.buffers[swap.buffer].kind is BufferKind.WEIGHT:
            for editor in editors:
                editor.weights.add(swap.buffer)
            if before != after or swap.first_use >= len(program.ops):
                editors[before].left_weights.add(swap.buffer)
            for position, kind in swap.actions(len(program.ops)):
                if kind in {SwapAction.IN_START, SwapAction.FIRST_USE}:
                    actions[after].append(_SwapEvent(position, kind, number))
            continue
        is_released_later = swap.out_start is not None and swap.release > segments[before].stop
        leaving = {SwapAction.OUT_START} if is_released_later else {SwapAction.OUT_START, SwapAction.RELEASE}
        for position, kind in swap.actions(len(program.ops)):
            actions[before if kind in leaving else after].append(_SwapEvent(position, kind, number))
        if before != after:
            editors[before].saved_as_token[swap.buffer] = is_released_later
            editors[after].receive(swap, editors[before].graph, is_released_later=is_released_later)
    for forward, backward in pairwise(editors):
        backward.receive_own_weights(forward.held_weights())
    for editor, segment, segment_actions in zip(editors, segments, actions, strict=True):
        for action in sorted(segment_actions):
            editor.apply(action, offset=action.position - segment.start)
        editor.finish()
    for forward, backward in pairwise(editors):
        forward.pass_on(backward)


def _last_uses(program: Program, plan: Plan) -> list[int]:
    """Return, by swap of ``plan``, the last op before it that uses its buffer."""
    uses: dict[int, list[int]] = {swap.buffer: [] for swap in plan.swaps}
    for op in program.ops:
        for buffer in uses.keys() & {*op.reads, *op.writes}:
            uses[buffer].append(op.index)
    return [uses[swap.buffer][bisect_left(uses[swap.buffer], swap.release) - 1] for swap in plan.swaps]


class _SwapInserter:
    """Editor of one graph, action by action in order of position."""

    def __init__(self, graph: SegmentGraph, plan: Plan, engine: int, names: Sequence[int]) -> None:
        self.graph, self.plan, self.engine, self._names = graph, plan, engine, names
        self._sizes = SizeNodes(graph.fx_graph)
        self.saved_as_token: dict[int, bool] = {}  # buffers among the saved outputs: whether also as a tensor
        self._received: list[int] = []  # buffers that arrive as a token
        self._tokens: dict[int, fx.Node] = {}  # the latest copy of each buffer
        self._sources: dict[int, fx.Node] = {}  # the node that an unfinished copy out reads
        self._incoming: dict[int, fx.Node] = {}
        self.weights: set[int] = set()  # buffers that are copied in from the graph's own inputs
        self.left_weights: set[int] = set()  # of these, non-resident at the graph's end
        self._own_weights: dict[int, fx.Node] = {}  # inputs beside copies of them that arrive
        self._values: dict[int, list[fx.Node]] = {}
        for node, buffer in graph.buffer_of.items():
            self._values.setdefault(buffer, []).append(node)

    def apply(self, action: _SwapEvent, *, offset: int) -> None:
        """Insert one action before the op at ``offset`` of the segment, or before the output.

        Raises:
            PlanInvalid: no value of the buffer is resident when its swap-out starts.
        """
        swap = self.plan.swaps[action.number]
        anchor = self.graph.ops[offset] if offset < len(self.graph.ops) else self.graph.output
        with self.graph.fx_graph.inserting_before(anchor):
            match action.kind:
                case SwapAction.OUT_START:
                    self._out_start(swap, anchor)
                case SwapAction.RELEASE:
                    self._release(swap)
                case SwapAction.IN_START:
                    self._in_start(swap)
                case SwapAction.FIRST_USE:
                    self._first_use(swap, anchor)

    def receive(self, swap: Swap, origin: SegmentGraph, *, is_released_later: bool) -> None:
        """Insert one token before the inputs that receive ``swap``'s buffer from ``origin``'s saved outputs.

        `finish` drops these inputs, but keeps the first if ``is_released_later``: the buffer is released in this graph.

        Raises:
            PlanInvalid: there is no such input.
        """
        inputs = sorted(node for node in self._values.get(swap.buffer, []) if node.op == "placeholder")
        if not inputs:
            raise PlanInvalid("saved values", f"the {origin.phase} graph does not save it", buffer=swap.buffer)
        token = self.graph.take_new(f"token_{swap.buffer}", self._fake_token(), before=inputs[0])
        _copy_version_check(inputs[0], token)
        self._tokens[swap.buffer] = token
        self._received.append(swap.buffer)
        if is_released_later:
            self._sources[swap.buffer] = inputs[0]

    def held_weights(self) -> list[int]:
        """Return the weights of which this graph, before it is edited, saves what will be a fetched copy."""
        saved = {self.graph.buffer_of[value] for value in self.graph.saved if value in self.graph.buffer_of}
        return sorted(saved & self.weights - self.left_weights)

    def receive_own_weights(self, buffers: Sequence[int]) -> None:
        """Insert an input for each weight that arrives as a copy: to fetch it again, and for autograd to check it."""
        for buffer in buffers:
            self._own_weights[buffer] = self.graph.take_new(f"own_{buffer}", self._own_weight(buffer).meta["val"])

    def finish(self) -> None:
        """Save tokens instead of tensors, drop what is no longer read, and check the graph.

        Raises:
            PlanInvalid: an op reads a value of a buffer that arrives as a token.
        """
        self._replace_saved_outputs()
        if self.weights:
            self._return_own_weights()
        for buffer in self._received:
            for node in [node for node in self._values[buffer] if node.op == "placeholder"]:
                users = [user for user in node.users if user.target is not ops.swap_out_wait]
                if users:
                    raise PlanInvalid("residency", f"'{users[0]}' reads it while it is swapped out", buffer=buffer)
                if not node.users:
                    self.graph.drop(node)
        for node in self.graph.fx_graph.find_nodes(op="call_function", target=ops.rng_state):
            if not node.users:  # no recompute reads it
                self.graph.drop(node)
        self.graph.fx_graph.lint()

    def _out_start(self, swap: Swap, anchor: fx.Node) -> None:
        source = next(iter(self._holders(swap.buffer, anchor)), None)
        if source is None:
            raise PlanInvalid("residency", "nothing holds its bytes when the copy out starts", buffer=swap.buffer)
        name = self._names[swap.buffer]
        *layout, offset, _, _ = sized_geometry(source, self._sizes)
        start = None if is_whole(source) else offset
        arguments = (source, self.engine, name, swap.tier, swap.offset, start, *layout)
        token = self._call(ops.swap_out_start, arguments, self._fake_token())
        self._tokens[swap.buffer], self._sources[swap.buffer] = token, source

    def _release(self, swap: Swap) -> None:
        if (source := self._sources.pop(swap.buffer, None)) is not None:
            self._call(ops.swap_out_wait, (self._tokens[swap.buffer], source, self.engine), None)

    def _in_start(self, swap: Swap) -> None:
        example: torch.Tensor = self._values[swap.buffer][0].meta["val"]
        nbytes = int(example.untyped_storage().nbytes())
        start: Any = ops.swap_in_start
        where: tuple[int, ...] = ()
        if swap.buffer in self.weights:
            start, source = ops.weight_in_start, self._own_weight(swap.buffer)
            where = (int(source.meta["val"].storage_offset()) * source.meta["val"].element_size(),)
        else:
            source = self._tokens[swap.buffer]
        arguments = (source, self.engine, self._names[swap.buffer], nbytes, *where, example.device)
        self._incoming[swap.buffer] = self._call(
            start, arguments, self.graph.fake((nbytes,), torch.uint8, example.device)
        )

    def _first_use(self, swap: Swap, anchor: fx.Node) -> None:
        flat = self._incoming.pop(swap.buffer)
        wait, source = (
            (ops.weight_in_wait, self._own_weight(swap.buffer))
            if swap.buffer in self.weights
            else (ops.swap_in_wait, self._tokens[swap.buffer])
        )
        ready = self._call(wait, (flat, source, self.engine), flat.meta["val"])
        for node in [node for node in self._values[swap.buffer] if node < anchor]:
            later = users_from(node, anchor)
            if later:
                view = view_of(ready, node, self._sizes)
                self._values[swap.buffer].append(view)
                for user in later:
                    user.replace_input_with(node, view)
            if node.target is ops.view_bytes and not node.users:  # it would read released memory
                self._values[swap.buffer].remove(node)
                self.graph.drop(node)

    def _own_weight(self, buffer: int) -> fx.Node:
        """Return the first input that lies in the host copy of ``buffer``."""
        if buffer in self._own_weights:
            return self._own_weights[buffer]
        inputs = [node for node in self._values.get(buffer, []) if node.op == "placeholder"]
        if not inputs:
            raise PlanInvalid("saved values", f"the {self.graph.phase} graph does not receive it", buffer=buffer)
        return min(inputs)

    def _return_own_weights(self) -> None:
        """Return to the caller, and save where they leave, weights as they are outside of the step."""
        output = self.graph.output
        buffer_of = {node: buffer for buffer in self.weights for node in self._values.get(buffer, [])}
        returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        for position, node in enumerate(returned):
            buffer = buffer_of.get(node)
            is_saved = position >= self.graph.num_user_outputs
            if buffer is not None and not (is_saved and buffer not in self.left_weights):
                returned[position] = self._own_view(buffer, node)
        output.args = (tuple(returned),)

    def pass_on(self, backward: _SwapInserter) -> None:
        """Save what the edited ``backward`` reads, and the own inputs that it receives.

        These come first: tensors whose version counter autograd does not check come last.
        """
        own = [self._own_weight(buffer) for buffer in reversed(backward._own_weights)]  # each was taken before the last
        taken = {*backward._own_weights.values()}
        passed = zip(self.graph.saved, (node for node in backward.graph.inputs if node not in taken), strict=False)
        self.graph.save([*own, *drop_unread(backward.graph, passed)])

    def _own_view(self, buffer: int, node: fx.Node) -> fx.Node:
        """Return a value like ``node`` on the memory of the graph's own input."""
        alike = [n for n in self._values[buffer] if n.op == "placeholder" and geometry(n) == geometry(node)]
        if alike:
            return min(alike)
        weight = self._own_weight(buffer)
        with self.graph.fx_graph.inserting_before(self.graph.output):
            return alias_of(weight, node)

    def _holders(self, buffer: int, anchor: fx.Node) -> Iterator[fx.Node]:
        """Yield nodes with the buffer's bytes at ``anchor``: latest copy in first, then whole values, then views."""
        values = [node for node in self._values.get(buffer, []) if node < anchor]
        rebuilt = [node for node in values if node.target is ops.view_bytes]
        yield from reversed(rebuilt)
        yield from sorted(values, key=is_whole, reverse=True)

    def _replace_saved_outputs(self) -> None:
        if not self.saved_as_token:
            return
        buffer_of = {node: buffer for buffer, nodes in self._values.items() for node in nodes}
        saved: list[Any] = []
        for node in self.graph.saved:
            buffer = buffer_of.get(node)
            if buffer not in self.saved_as_token:
                saved.append(node)
            elif self._tokens[buffer] not in saved:
                saved += [self._tokens[buffer], node] if self.saved_as_token[buffer] else [self._tokens[buffer]]
                _copy_version_check(node, self._tokens[buffer])
        self.graph.save(saved)

    def _call(self, target: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
        node: fx.Node = self.graph.fx_graph.call_function(target, arguments)
        if value is not None:
            node.meta["val"] = value
        return node

    def _fake_token(self) -> torch.Tensor:
        return self.graph.fake((1,), torch.int64, torch.device("cpu"))


def _copy_version_check(value: fx.Node, token: fx.Node) -> None:
    """Let autograd check the version of ``token`` if it checks that of ``value``, which it replaces."""
    key = "saved_tensor_with_no_vc_check"
    if key in value.meta:
        token.meta[key] = value.meta[key]
