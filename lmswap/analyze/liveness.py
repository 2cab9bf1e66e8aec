"""Lifetimes (live ranges) of buffers, and the gaps between their uses.

::

    op          0   1   2   3   4   5   6   7
    buffer     def      use             use
    live range [========================== )     [0, 7), half-open: from its def to one past its last use
    gaps            -       -   -   -            Gap(after=0, before=2), Gap(after=2, before=6)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from lmswap.errors import CaptureError
from lmswap.ir.program import BufferKind, Program, Segment


@dataclass(frozen=True, slots=True)
class LiveRange:
    """The ops [start, stop) during which a buffer occupies memory, and those that read or write it, ascending."""

    buffer: int
    start: int
    stop: int
    uses: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """A stretch of at least one op between two uses of a buffer: ``after`` the one, ``before`` the other."""

    buffer: int
    after: int
    before: int


def live_ranges(program: Program, released: Collection[int] = ()) -> dict[int, LiveRange]:
    """Live ranges of the buffers that the step allocates or is given as tangents, by buffer id.

    Parameters and inputs live outside the step and have none; nor has a buffer that no op names. Outputs and tangents
    live for as long as the caller may hold them; those ``released`` only while the step itself needs them. Persistent
    buffers live for the whole step.

    Args:
        program: the step.
        released: ids of outputs and tangents that the caller does not hold.

    Raises:
        CaptureError: an op reads a buffer of the step before any op has written it.
    """
    uses = defaultdict[int, list[int]](list)
    writes = defaultdict[int, list[int]](list)
    for op in program.ops:
        for buffer in dict.fromkeys(op.reads + op.writes):
            uses[buffer].append(op.index)
        for buffer in dict.fromkeys(op.writes):
            writes[buffer].append(op.index)
    return {
        buffer.id: _live_range(
            program, buffer.id, tuple(uses[buffer.id]), tuple(writes[buffer.id]), buffer.id in released
        )
        for buffer in program.buffers
        if buffer.is_persistent or (buffer.id in uses and not buffer.is_resident)
    }


def _live_range(
    program: Program, buffer: int, uses: tuple[int, ...], writes: tuple[int, ...], is_released: bool
) -> LiveRange:
    kind = program.buffers[buffer].kind
    if program.buffers[buffer].is_persistent:
        return LiveRange(buffer, 0, len(program.ops), uses, writes)
    if kind is BufferKind.TANGENT:
        # The caller holds a backward segment's arguments for as long as the segment runs.
        first, last = program.segment_of(uses[0]), program.segment_of(uses[-1])
        return LiveRange(buffer, first.start, uses[-1] + 1 if is_released else last.stop, uses, writes)
    if not writes or writes[0] > uses[0] or buffer in program.ops[uses[0]].reads:
        op = program.ops[uses[0]]
        raise CaptureError(
            f"op {op.index} '{op.name}' reads {kind} '{program.buffer_names[buffer]}' before any op has written it"
        )
    stop = uses[-1] + 1
    if kind in (BufferKind.OUTPUT, BufferKind.GRADIENT):
        stop = max(stop, program.segment_of(writes[-1]).stop) if is_released else len(program.ops)
    return LiveRange(buffer, uses[0], stop, uses, writes)


def gaps(live_range: LiveRange) -> tuple[Gap, ...]:
    """The gaps of one buffer, in order of time."""
    return tuple(Gap(live_range.buffer, a, b) for a, b in pairwise(live_range.uses) if b > a + 1)


def swappable_gaps(program: Program, ranges: Mapping[int, LiveRange], min_bytes: int) -> tuple[Gap, ...]:
    """The gaps in which an activation of at least ``min_bytes`` can be non-resident, ordered by buffer and time.

    Both ends are in one segment, or in the forward and the backward segment of one graph: only these compiled functions
    can pass a swapped buffer from one to the other.
    """
    buffers = program.buffers
    found = [
        gap
        for buffer, live_range in ranges.items()
        if buffers[buffer].kind is BufferKind.ACTIVATION and buffers[buffer].nbytes >= max(min_bytes, 1)
        for gap in gaps(live_range)
    ]
    owner = segment_by_op(program)
    return tuple(gap for gap in found if owner[gap.after].can_pass_values_to(owner[gap.before]))


def segment_by_op(program: Program) -> tuple[Segment, ...]:
    """The segment that executes each op, by op."""
    return tuple(segment for segment in program.segments for _ in range(segment.start, segment.stop))
