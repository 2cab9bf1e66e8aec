"""Schedules: program + recomputes → a longer program.

A recompute is an ordinary op that writes new buffers, which later ops read instead. Liveness, memory, copies and graphs
of a step with recomputation need no special rules: they are those of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmswap.ir.costs import OpCosts
from lmswap.ir.plan import Decision, Plan, Recompute
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment


@dataclass(frozen=True)
class Schedule:
    """``program`` is what runs; the tuples say what its ops and buffers are in the program that was planned.

    Buffers of the planned program keep their ids; recomputed ones follow.
    """

    program: Program
    ops: tuple[int, ...]
    buffers: tuple[int, ...]

    def costs(self, costs: OpCosts) -> OpCosts:
        """Maps ``costs`` of the planned program to the ops of the schedule."""
        return OpCosts(
            tuple(costs.seconds[op] for op in self.ops),
            tuple(costs.scratch_bytes[op] for op in self.ops),
            costs.source,
            tuple(costs.pieces[op] for op in self.ops) if costs.pieces else (),
        )

    def decisions(self, plan: Plan) -> tuple[Decision, ...]:
        """Action by buffer of the planned program; one that is both swapped and recomputed counts as swapped."""
        read = {buffer for op in self.program.ops for buffer in op.reads}
        found = dict.fromkeys(self.buffers, Decision.KEEP)
        for made, buffer in enumerate(self.buffers):
            if made != buffer and made in read:
                found[buffer] = Decision.RECOMPUTE
        for swap in plan.swaps:
            found[self.buffers[swap.buffer]] = Decision.SWAP
        return tuple(found.values())


def schedule(program: Program, recomputes: Sequence[Recompute]) -> Schedule:
    """The schedule of ``program`` with ``recomputes``.

    Args:
        program: the planned step.
        recomputes: of repeatable ops, in order of execution.
    """
    if not recomputes:
        return Schedule(program, tuple(range(len(program.ops))), tuple(range(len(program.buffers))))
    return _Expansion(program, recomputes).schedule()


class _Expansion:
    def __init__(self, program: Program, recomputes: Sequence[Recompute]) -> None:
        self._program, self._recomputes = program, recomputes
        self._ops: list[Op] = []
        self._origins: list[int] = []
        self._buffers = list(program.buffers)
        self._values = list(program.values)
        self._buffer_origins = list(range(len(program.buffers)))
        self._newest = list(range(len(program.buffers)))  # by buffer: the one that holds its bytes now
        self._value_of = {value.buffer: value for value in reversed(program.values)}

    def schedule(self) -> Schedule:
        program, next_recompute = self._program, 0
        segments = []
        for segment in program.segments:
            start = len(self._ops)
            for index in range(segment.start, segment.stop):
                while next_recompute < len(self._recomputes) and self._recomputes[next_recompute].position == index:
                    self._append_recompute(program.ops[self._recomputes[next_recompute].op])
                    next_recompute += 1
                self._append(program.ops[index], program.ops[index].writes, program.ops[index].name)
            segments.append(Segment(segment.graph, segment.phase, start, len(self._ops)))
        longer = Program(program.name, tuple(self._ops), tuple(self._buffers), tuple(self._values), tuple(segments))
        return Schedule(longer, tuple(self._origins), tuple(self._buffer_origins))

    def _append_recompute(self, op: Op) -> None:
        recomputed = tuple(self._recomputed_version(buffer) for buffer in op.writes)
        self._append(op, recomputed, f"{op.name} (recomputed)")
        for buffer, new in zip(op.writes, recomputed, strict=True):
            self._newest[buffer] = new

    def _append(self, op: Op, writes: tuple[int, ...], name: str) -> None:
        reads = tuple(self._newest[buffer] for buffer in op.reads)
        if writes is op.writes:
            # A write to an existing buffer goes to its newest version; the op that creates it is its own newest.
            writes = tuple(self._newest[buffer] for buffer in writes)
        self._ops.append(replace(op, index=len(self._ops), name=name, reads=reads, writes=writes))
        self._origins.append(op.index)

    def _recomputed_version(self, buffer: int) -> int:
        made = len(self._buffers)
        name = f"{self._program.buffer_names[buffer]} (recomputed)"
        self._buffers.append(Buffer(made, self._program.buffers[buffer].nbytes, BufferKind.ACTIVATION, name))
        self._buffer_origins.append(buffer)
        shape = self._value_of.get(buffer)
        if shape is not None:
            self._values.append(replace(shape, id=len(self._values), name=f"{shape.name} (recomputed)", buffer=made))
        return made
