"""Merges the programs of several captured graphs into the Program of a step, and splits its plan by graph.

Graph breaks cut a model into graphs 0, 1, 2 …; a step runs their forwards in that order and their backwards in reverse,
unless its losses require another order. A merged program counts memory and link time across all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lmswap.errors import CaptureError
from lmswap.ir.costs import OpCosts, Piece
from lmswap.ir.plan import Plan, Recompute
from lmswap.ir.program import Op, Program, Segment
from lmswap.ir.schedule import schedule


@dataclass(frozen=True)
class MergedPrograms:
    """The step's program, and the offsets of each graph's buffers in it."""

    program: Program
    buffer_offsets: tuple[int, ...]  # buffer b of graph g is buffer b + buffer_offsets[g] of the step


def merge(programs: Sequence[Program], backwards: Iterable[int] | None = None) -> MergedPrograms:
    """Merge the programs of graphs that run one after another; a single program is unchanged.

    Args:
        programs: of the graphs, in the order of their forwards.
        backwards: indices into ``programs`` in the order of the backwards; the reverse order if None.

    Raises:
        CaptureError: there is no program.
    """
    if not programs:
        raise CaptureError("a step needs at least one captured graph")
    if len(programs) == 1:
        return MergedPrograms(programs[0], (0,))
    if backwards is None:
        backwards = (graph for graph in reversed(range(len(programs))) if len(programs[graph].segments) > 1)
    order = [(graph, 0) for graph in range(len(programs))] + [(graph, 1) for graph in backwards]
    buffer_offsets = _running_sums(len(program.buffers) for program in programs)
    value_offsets = _running_sums(len(program.values) for program in programs)
    ops: list[Op] = []
    segments: list[Segment] = []
    for graph, which in order:
        segment = programs[graph].segments[which]
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
    gradients = tuple(
        (parameter + shift, gradient + shift)
        for program, shift in zip(programs, buffer_offsets, strict=True)
        for parameter, gradient in program.gradients
    )
    program = Program(programs[0].name, tuple(ops), tuple(buffers), tuple(values), tuple(segments), gradients=gradients)
    return MergedPrograms(program, buffer_offsets)


def merge_costs(merged: MergedPrograms, costs: Sequence[OpCosts]) -> OpCosts:
    """Return the ``costs`` of the graphs in the order of the step's ops."""
    seconds, scratch = [0.0] * len(merged.program.ops), [0] * len(merged.program.ops)
    pieces: list[tuple[Piece, ...]] = [()] * len(merged.program.ops)
    taken = [0] * len(costs)
    for segment in merged.program.segments:
        own = slice(taken[segment.graph], taken[segment.graph] + segment.stop - segment.start)
        taken[segment.graph] = own.stop
        seconds[segment.start : segment.stop] = costs[segment.graph].seconds[own]
        scratch[segment.start : segment.stop] = costs[segment.graph].scratch_bytes[own]
        pieces[segment.start : segment.stop] = map(costs[segment.graph].of, range(own.start, own.stop))
    first_run_bytes = sum(each.first_run_bytes for each in costs)
    return OpCosts(tuple(seconds), tuple(scratch), costs[0].source, tuple(pieces), first_run_bytes)


def graph_plan(merged: MergedPrograms, plan: Plan, graph: int, program: Program) -> Plan:
    """Return the part of the step's ``plan`` for one graph, in that graph's own numbers of ops and buffers.

    Args:
        merged: the step.
        plan: of the step.
        graph: its index in the step.
        program: of the graph.

    Raises:
        CaptureError: a position of the plan is in no segment of the graph.
    """
    step, shift = merged.program, merged.buffer_offsets[graph]
    in_program = _own_positions(step, graph, program)
    recomputes = tuple(
        Recompute(in_program(recompute.op), in_program(recompute.position))
        for recompute in plan.recomputes
        if step.segment_of(recompute.op).graph == graph
    )
    runs, own_runs = schedule(step, plan.recomputes), schedule(program, recomputes)
    in_schedule = _own_positions(runs.program, graph, own_runs.program)
    num_ops, num_own = len(runs.program.ops), len(own_runs.program.ops)

    def in_cycle(position: int) -> int:
        """As ``in_schedule``, of a position of this step or the next."""
        return in_schedule(position) if position < num_ops else in_schedule(position - num_ops) + num_own

    of_program = range(shift, shift + len(program.buffers))
    # Both schedules number the program's buffers first and then the recomputed ones in order of execution.
    of_schedule = [buffer for buffer, origin in enumerate(runs.buffers) if origin in of_program]
    own = {buffer: number for number, buffer in enumerate(of_schedule)}
    swaps = tuple(
        replace(
            swap,
            buffer=own[swap.buffer],
            out_start=None if swap.out_start is None else in_schedule(swap.out_start),
            release=in_schedule(swap.release),
            in_start=in_cycle(swap.in_start),
            first_use=in_cycle(swap.first_use),
        )
        for swap in plan.swaps
        if swap.buffer in own
    )
    reasons = {buffer - shift: why for buffer, why in plan.reasons.items() if buffer in of_program}
    return replace(plan, swaps=swaps, recomputes=recomputes, reasons=reasons)


def _own_positions(step: Program, graph: int, program: Program) -> Callable[[int], int]:
    """Return the map from positions of ``step`` to those of ``program``, its part for ``graph``."""
    segments = [segment for segment in step.segments if segment.graph == graph]

    def own(position: int) -> int:
        # A position between two segments belongs to the graph's own segment: the verifier has checked that swap-outs
        # lie in the segment of the previous use and swap-ins in the segment of the next one.
        for theirs, ours in zip(segments, program.segments, strict=True):
            if theirs.start <= position <= theirs.stop:
                return position - theirs.start + ours.start
        raise CaptureError(f"position {position} of the step is in no segment of graph {graph}")

    return own


def _running_sums(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))[:-1]
