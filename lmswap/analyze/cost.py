"""Op costs without measurements: program (+ machine) → `OpCosts`."""

from __future__ import annotations

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.program import LOSS, Op, Program


def roofline(program: Program, machine: Machine) -> OpCosts:
    """Estimates each op by the machine's roofline (Williams et al., 2009): the worst of compute, traffic and launch.

    An op is charged the whole of every buffer it names, also where a view reads only part of it. Views cost nothing.
    Scratch is the program's, where it was measured, or none.
    """

    def seconds(op: Op) -> float:
        if op.is_view or op.target == LOSS:  # caller's code is not part of the graphs' seconds
            return 0.0
        moved_bytes = sum(program.buffers[buffer].nbytes for buffer in (*op.reads, *op.writes))
        return max(op.flops / machine.flops_per_second, moved_bytes / machine.bytes_per_second, machine.op_seconds)

    scratch_bytes = program.scratch_bytes or (0,) * len(program.ops)
    return OpCosts(tuple(seconds(op) for op in program.ops), scratch_bytes, "roofline")


def unit(program: Program) -> OpCosts:
    """One second an op and no scratch, for tests whose sums are done by hand."""
    return OpCosts((1.0,) * len(program.ops), (0,) * len(program.ops), "unit")
