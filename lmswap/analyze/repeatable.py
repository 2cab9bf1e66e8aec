"""Repeatable ops: those whose recompute is bitwise identical, as a flag by op."""

from __future__ import annotations

from lmswap.ir.program import BufferKind, Program


def repeatable_ops(program: Program) -> tuple[bool, ...]:
    """By op: whether recomputing it later in the same step gives bitwise identical buffers.

    True if the op is marked repeatable, creates only buffers that nothing else writes, and reads nothing that is
    written later, by the step or by its caller. Weights may be: then it is repeatable until their update.
    """
    if not any(op.is_repeatable for op in program.ops):  # as of a step that hooks recorded
        return (False,) * len(program.ops)
    first_use: dict[int, int] = {}
    last_write: dict[int, int] = {}
    for op in program.ops:
        for buffer in (*op.reads, *op.writes):
            first_use.setdefault(buffer, op.index)
        for buffer in op.writes:
            last_write[buffer] = op.index
    exposed = exposed_buffers(program)
    return tuple(
        op.is_repeatable
        and bool(op.writes)
        and all(first_use[buffer] == last_write[buffer] == op.index and buffer not in op.reads for buffer in op.writes)
        and all(
            (last_write.get(buffer, -1) < op.index or program.buffers[buffer].is_persistent) and buffer not in exposed
            for buffer in op.reads
        )
        for op in program.ops
    )


def exposed_buffers(program: Program) -> frozenset[int]:
    """Buffers that a forward reads and the caller may write before the backward: eager torch has not saved them.

    These are the batch, module buffers and outputs, unless an op of the backward reads them: then torch has saved them
    too, and rejects a step in which they were written. Parameters are written by optimizers, after steps.
    """
    read: dict[str, set[int]] = {"forward": set(), "backward": set()}
    used, made = set[int](), set[int]()
    for segment in program.segments:
        for op in program.ops[segment.start : segment.stop]:
            read.setdefault(segment.phase, set()).update(op.reads)
            made.update({*op.writes} - {*op.reads} - used)
            used.update(op.reads, op.writes)
    kinds = {buffer.id: buffer.kind for buffer in program.buffers}
    return frozenset(
        buffer
        for buffer in read["forward"] - read["backward"]
        if kinds[buffer] is BufferKind.OUTPUT or (kinds[buffer] is BufferKind.INPUT and buffer not in made)
    )
