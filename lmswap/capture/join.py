"""How do several captured graphs run in one step? Programs of graphs → the Program of the step.

Graph breaks cut a model into graphs 0, 1, 2 …; a step runs their forwards in that order and their backwards in
reverse. A joined program counts memory and link time across all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lmswap.errors import CaptureError
from lmswap.ir.plan import Plan
from lmswap.ir.program import Op, Program, Segment


@dataclass(frozen=True)
class Joined:
    """The step's program, and where each graph's own numbers went."""

    program: Program
    buffer_offsets: tuple[int, ...]  # buffer b of graph g is buffer b + buffer_offsets[g] of the step
    segment_starts: tuple[tuple[int, ...], ...]  # [graph][segment of that graph] -> first op in the step


def join(programs: Sequence[Program]) -> Joined:
    """Joins the programs of graphs that run one after another; one program joins to itself."""
    if not programs:
        raise CaptureError("a step needs at least one captured graph")
    order = [(graph, 0) for graph in range(len(programs))]
    order += [(graph, 1) for graph in reversed(range(len(programs))) if len(programs[graph].segments) > 1]
    buffer_offsets = _running_sums(len(program.buffers) for program in programs)
    value_offsets = _running_sums(len(program.values) for program in programs)
    ops: list[Op] = []
    segments: list[Segment] = []
    starts = [[0] * len(program.segments) for program in programs]
    for graph, which in order:
        segment = programs[graph].segments[which]
        starts[graph][which] = len(ops)
        segments.append(Segment(graph, segment.phase, len(ops), len(ops) + segment.stop - segment.start))
        shift = buffer_offsets[graph]
        for op in programs[graph].ops[segment.start : segment.stop]:
            reads, writes = (tuple(b + shift for b in buffers) for buffers in (op.reads, op.writes))
            ops.append(replace(op, index=len(ops), reads=reads, writes=writes))
    buffers = [
        replace(buffer, id=buffer.id + shift)
        for program, shift in zip(programs, buffer_offsets, strict=True)
        for buffer in program.buffers
    ]
    values = [
        replace(value, id=value.id + value_shift, buffer=value.buffer + shift)
        for program, shift, value_shift in zip(programs, buffer_offsets, value_offsets, strict=True)
        for value in program.values
    ]
    program = Program(programs[0].name, tuple(ops), tuple(buffers), tuple(values), tuple(segments))
    return Joined(program, buffer_offsets, tuple(tuple(graph) for graph in starts))


def graph_plan(joined: Joined, plan: Plan, graph: int, program: Program) -> Plan:
    """The part of the step's ``plan`` that ``graph`` carries out, in that graph's own buffer and op numbers."""
    shift = joined.buffer_offsets[graph]
    own = range(shift, shift + len(program.buffers))

    def local(position: int) -> int:
        # A position on the border between two segments belongs to the graph's own one: the verifier has checked
        # that copies out lie in the segment of the use before them and copies in in the segment of the use after.
        for segment, start in zip(program.segments, joined.segment_starts[graph], strict=True):
            if start <= position <= start + segment.stop - segment.start:
                return position - start + segment.start
        raise CaptureError(f"position {position} of the step lies in no segment of graph {graph}")

    swaps = tuple(
        replace(
            swap,
            buffer=swap.buffer - shift,
            out_start=None if swap.out_start is None else local(swap.out_start),
            release=local(swap.release),
            in_start=local(swap.in_start),
            first_use=local(swap.first_use),
        )
        for swap in plan.swaps
        if swap.buffer in own
    )
    return replace(plan, swaps=swaps, reasons={b - shift: why for b, why in plan.reasons.items() if b in own})


def _running_sums(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))[:-1]
