"""In which buckets are gradients summed over ranks, and when is each complete? As DistributedDataParallel does it.

Gradients go into buckets in the order in which they are made; a bucket is full when it has reached its size, and
buckets are summed in that order, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.program import BufferKind, Program

# DistributedDataParallel's own: a small first one, so that the network begins early.
_FIRST_BYTES, _BYTES = 2**20, 25 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed at once: ``nbytes`` of them, which have all arrived when op ``last`` is over."""

    nbytes: int
    last: int


def fill_buckets(program: Program) -> tuple[Bucket, ...]:
    """The buckets of all gradients that backward graphs hand out."""
    buckets: list[Bucket] = []
    nbytes, last = 0, 0
    for buffer, last in _in_order(program).items():
        nbytes += program.buffers[buffer].nbytes
        if nbytes >= (_BYTES if buckets else _FIRST_BYTES):
            buckets.append(Bucket(nbytes, last))
            nbytes = 0
    return (*buckets, Bucket(nbytes, last)) if nbytes else tuple(buckets)


def _in_order(program: Program) -> dict[int, int]:
    """By gradient, in the order in which they are made: the op that writes it last."""
    made: dict[int, int] = {}
    for op in program.ops:
        for buffer in op.writes:
            if program.buffers[buffer].kind is BufferKind.GRADIENT:
                made.pop(buffer, None)
                made[buffer] = op.index
    return made
