"""Names of the results of a graph, and of the moved buffers that they depend on, for verification's errors."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from lmswap.capture.lower import source_line
from lmswap.runtime.codegen import SegmentGraph
from lmswap.verify.summary import Result

_MAX_NAMED = 4


def input_names(region: fx.Graph) -> tuple[str, ...]:
    """Return the names of a captured graph's inputs: "encoder.0.weight" for the model's own, else the argument's."""
    return tuple(_input_name(node) for node in region.find_nodes(op="placeholder"))


def results(
    graph: SegmentGraph, inputs: Sequence[str], moved: Collection[int], names: Sequence[str]
) -> tuple[Result, ...]:
    """Return the results of ``graph`` that its caller gets.

    Args:
        graph: as lowered, before swaps are inserted.
        inputs: names of the region's inputs.
        moved: the buffers that a plan swaps or recomputes.
        names: of all buffers.
    """
    (output,) = graph.module.graph.find_nodes(op="output")
    returned = list(output.args[0])
    count = len(returned) if graph.phase == "backward" else graph.num_user_outputs
    descriptions = output.meta.get("desc") or [None] * len(returned)
    buffers = {node: names[buffer] for node, buffer in graph.buffer_of.items() if buffer in moved}
    return tuple(
        _result(_producer(node, graph.buffer_of), description, position, inputs, buffers)
        for position, (node, description) in enumerate(zip(returned[:count], descriptions[:count], strict=True))
    )


def _result(
    node: Any, description: Any, position: int, inputs: Sequence[str], buffers: Mapping[fx.Node, str]
) -> Result:
    name = f"output {position}"
    for kind, text in (("grad_of", "the gradient of"), ("mutated_input", "the new value of")):
        if hasattr(description, kind):
            index = getattr(getattr(description, kind), "idx", -1)
            name = f"{text} {inputs[index] if 0 <= index < len(inputs) else f'input {position}'}"
    if not isinstance(node, fx.Node):
        return Result(name, "nothing")
    return Result(name, f"op '{node.name}' ({node.target})", source_line(node), _nearest_swapped(node, buffers))


def _producer(node: Any, buffer_of: Mapping[fx.Node, int]) -> Any:
    """Return the op that made the memory of ``node``: a gradient is often the transpose of a product."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        shown = next((given for given in node.all_input_nodes if buffer_of.get(given) == buffer_of.get(node)), None)
        if shown is None or node not in buffer_of:
            break
        node = shown
    return node


def _nearest_swapped(node: fx.Node, buffers: Mapping[fx.Node, str]) -> tuple[str, ...]:
    """Return the names of moved buffers from which ``node`` was computed, the nearest first."""
    found: dict[str, None] = {}
    seen, queue = {node}, deque([node])
    while queue and len(found) < _MAX_NAMED:
        reached = queue.popleft()
        if reached in buffers:
            found[buffers[reached]] = None
        ahead = [given for given in reached.all_input_nodes if given not in seen]
        seen.update(ahead)
        queue.extend(ahead)
    return tuple(found)


def _input_name(node: fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = str(getattr(source, "name", None) or node.name)
    path = re.findall(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]", name)
    local = re.fullmatch(r"L\['([^']+)'\]", name)
    return ".".join(path) or (local[1] if local else name)
