"""Gradient buckets of an all-reduce, filled as by DistributedDataParallel.

Gradients are assigned in the order in which they are computed; a bucket is full when it has reached its size, and
buckets are all-reduced in that order, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.program import BufferKind, Program

# DistributedDataParallel's defaults: a small first one, so that communication begins early.
_FIRST_BYTES, _BYTES = 2**20, 25 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are all-reduced together: ``nbytes``, complete after op ``last``."""

    nbytes: int
    last: int


def fill_buckets(program: Program) -> tuple[Bucket, ...]:
    """The buckets of all gradients that backward graphs return, in order of their all-reduces."""
    buckets: list[Bucket] = []
    nbytes, last = 0, 0
    for buffer, last in _in_order(program).items():
        nbytes += program.buffers[buffer].nbytes
        if nbytes >= (_BYTES if buckets else _FIRST_BYTES):
            buckets.append(Bucket(nbytes, last))
            nbytes = 0
    return (*buckets, Bucket(nbytes, last)) if nbytes else tuple(buckets)


def _in_order(program: Program) -> dict[int, int]:
    """The op that writes each gradient last, in the order in which gradients are computed."""
    made: dict[int, int] = {}
    for op in program.ops:
        for buffer in op.writes:
            if program.buffers[buffer].kind is BufferKind.GRADIENT:
                made.pop(buffer, None)
                made[buffer] = op.index
    return made
