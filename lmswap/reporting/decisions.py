"""The action planned for each buffer of a step and its reason, with the lines of user code."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import BufferKind, Op, Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Timeline
from lmswap.reporting.resident_intervals import resident_intervals


@dataclass(frozen=True, slots=True)
class BufferDecision:
    """The action for one buffer. Operators are those of the traced step; lines are the user's, "" where unknown.

    ``is_weight``: a parameter that the plan places; it exists between steps. ``resident``: intervals on the device in
    seconds, () without a prediction. ``clock`` names their timeline: "measured" where a step has run as planned, else
    "predicted".
    """

    buffer: int
    name: str
    nbytes: int
    decision: Decision
    made_by: str
    made_at: str
    last_used_by: str
    last_used_at: str
    reason: str
    is_weight: bool = False
    resident: tuple[tuple[float, float], ...] = ()
    clock: str = ""

    @property
    def label(self) -> str:
        """The buffer's name and the line that makes it, whose position may be part of the name."""
        where, _, code = self.made_at.partition(" ")
        return f"{self.name}  {code if where in self.name else self.made_at}".rstrip()


def buffer_decisions(
    program: Program, plan: Plan, predicted: Timeline | None = None, measured: Timeline | None = None
) -> tuple[BufferDecision, ...]:
    """Return one decision for each buffer that the step allocates, in the program's order.

    Inputs and parameters that no plan places are omitted: they live outside the step.
    """
    decisions = schedule(program, plan.recomputes).decisions(plan)
    resident, clock = resident_intervals(program, plan, predicted, measured) if predicted is not None else ({}, "")
    first: dict[int, Op] = {}
    last: dict[int, Op] = {}
    for op in program.ops:
        for buffer in op.writes:
            first.setdefault(buffer, op)
        for buffer in (*op.reads, *op.writes):
            last[buffer] = op
    return tuple(
        BufferDecision(
            buffer=buffer.id,
            name=program.buffer_names[buffer.id],
            nbytes=buffer.nbytes,
            decision=decisions[buffer.id],
            made_by=first[buffer.id].target if buffer.id in first else "",
            made_at=first[buffer.id].source if buffer.id in first else "",
            last_used_by=last[buffer.id].target if buffer.id in last else "",
            last_used_at=last[buffer.id].source if buffer.id in last else "",
            # The text repeats neither the decision nor the size, which have columns of their own.
            reason=plan.reasons.get(buffer.id, "")
            .removeprefix(f"{decisions[buffer.id]}: ")
            .removeprefix(f"{format_bytes(buffer.nbytes)} "),
            is_weight=buffer.kind is BufferKind.WEIGHT,
            resident=resident.get(buffer.id, ()),
            clock=clock,
        )
        for buffer in program.buffers
        if not buffer.is_resident and buffer.nbytes > 0
    )
