"""Topological levels of the data-flow graph, by op: the distances that TFLMS plans with."""

from __future__ import annotations

from lmswap.ir.program import BufferKind, Program


def levels(program: Program) -> tuple[int, ...]:
    """Length of the longest path to each op, by op.

    What happens between forward and backward is outside the program, so an op that reads a tangent counts as one level
    below everything in the segments before its own: the loss that the tangent comes from depends on their outputs.
    """
    graph = program.to_networkx()
    found: list[int] = []
    for segment in program.segments:
        deepest_before = max(found, default=-1)
        for op in program.ops[segment.start : segment.stop]:
            level = max((found[earlier] for earlier in graph.predecessors(op.index)), default=-1)
            if any(program.buffers[buffer].kind is BufferKind.TANGENT for buffer in op.reads):
                level = max(level, deepest_before)
            found.append(level + 1)
    return tuple(found)
