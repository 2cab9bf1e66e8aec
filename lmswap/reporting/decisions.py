"""What was decided for each buffer of a step and why, in the terms of the user's own source lines."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Buffer, Op, Program


@dataclass(frozen=True, slots=True)
class BufferDecision:
    """The fate of one buffer. Operators are those of the traced step; lines are the user's, "" where unknown."""

    buffer: int
    name: str
    nbytes: int
    decision: Decision
    made_by: str
    made_at: str
    last_used_by: str
    last_used_at: str
    reason: str


def buffer_decisions(program: Program, plan: Plan) -> tuple[BufferDecision, ...]:
    """One decision for each buffer that the step allocates, in the program's order.

    Parameters and inputs are left out: they live outside the step, and no plan can move them.
    """
    first: dict[int, Op] = {}
    last: dict[int, Op] = {}
    for op in program.ops:
        for buffer in op.writes:
            first.setdefault(buffer, op)
        for buffer in (*op.reads, *op.writes):
            last[buffer] = op
    return tuple(
        _decide(buffer, program, plan, first.get(buffer.id), last.get(buffer.id))
        for buffer in program.buffers
        if not buffer.is_resident and buffer.nbytes > 0
    )


def _decide(buffer: Buffer, program: Program, plan: Plan, made: Op | None, used: Op | None) -> BufferDecision:
    decision = plan.decision(buffer.id)
    return BufferDecision(
        buffer=buffer.id,
        name=program.buffer_names[buffer.id],
        nbytes=buffer.nbytes,
        decision=decision,
        made_by=made.target if made else "",
        made_at=made.source if made else "",
        last_used_by=used.target if used else "",
        last_used_at=used.source if used else "",
        # A reason stands beside its decision here and need not name it again.
        reason=plan.reasons.get(buffer.id, "").removeprefix(f"{decision}: "),
    )
