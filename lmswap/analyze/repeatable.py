"""Which ops can run a second time and give the same bits? Program → a flag for each op."""

from __future__ import annotations

from lmswap.ir.program import Program


def repeatable_ops(program: Program) -> tuple[bool, ...]:
    """By op: whether a later run of it in the same step makes its buffers anew, bit for bit.

    It does if the op says so, only makes buffers that nothing writes again, and reads nothing that is written later.
    """
    first_use: dict[int, int] = {}
    last_write: dict[int, int] = {}
    for op in program.ops:
        for buffer in (*op.reads, *op.writes):
            first_use.setdefault(buffer, op.index)
        for buffer in op.writes:
            last_write[buffer] = op.index
    return tuple(
        op.is_repeatable
        and bool(op.writes)
        and all(first_use[buffer] == last_write[buffer] == op.index and buffer not in op.reads for buffer in op.writes)
        and all(last_write.get(buffer, -1) < op.index for buffer in op.reads)
        for op in program.ops
    )
