"""Streaming: buffers leave the device after one use and return for the next, as trainers with fixed windows do it.

The step is divided into *stretches*, each the ops of one layer; a window of ``slots`` stretches is on the device. What
a layer used leaves when its stretch ends, and returns when the stretch that is ``slots`` before its next one has ended:
with two slots, while the layer before it runs (double buffering). What was written is copied out from its last write
on, and leaves ``slots`` - 1 stretches after its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from lmswap.analyze.liveness import Gap, LiveRange
from lmswap.ir.plan import Swap
from lmswap.ir.program import BufferKind, Program

_LAYER = re.compile(r"(.*?\.\d+)\.")


def layers(
    program: Program, kinds: Collection[BufferKind], min_bytes: int, *, frozen_only: bool = False
) -> list[list[int]]:
    """Buffers of at least ``min_bytes`` by layer: "layers.3" of "layers.3.q.weight"; those of no layer are left out."""
    written = {buffer for op in program.ops for buffer in op.writes} if frozen_only else set()
    found: dict[str, list[int]] = defaultdict(list)
    for buffer in program.buffers:
        layer = _LAYER.match(buffer.name)
        if buffer.kind in kinds and buffer.nbytes >= min_bytes and layer is not None and buffer.id not in written:
            found[layer[1]].append(buffer.id)
    return list(found.values())


def stretch_ends(program: Program, groups: Sequence[Sequence[int]]) -> list[int]:
    """The positions after the ops of a group, before the next one's; updates count as ops of none."""
    group_of = {buffer: number for number, group in enumerate(groups) for buffer in group}
    ends: list[int] = []
    current: int | None = None
    for op in program.ops:
        used = {group_of[buffer] for buffer in (*op.reads, *op.writes) if buffer in group_of}
        if not used or is_update(program, op.index):
            continue
        if current in used and ends:
            ends[-1] = op.index + 1
        else:
            current = min(used)
            ends.append(op.index + 1)
    return ends


def state_by_update(program: Program) -> list[list[int]]:
    """Optimizer state by the op that updates it, in order."""
    state = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.OPTIMIZER_STATE}
    return [sorted(found) for op in program.ops if (found := state.intersection(op.writes))]


def is_update(program: Program, op: int) -> bool:
    """Whether an op updates parameters on the device."""
    return any(program.buffers[buffer].kind is BufferKind.OPTIMIZER_STATE for buffer in program.ops[op].writes)


def saved(program: Program, ranges: Iterable[LiveRange], min_bytes: int) -> list[LiveRange]:
    """Activations of at least ``min_bytes`` that a forward passes to its backward: inputs of checkpointed layers."""
    return [
        live_range
        for live_range in ranges
        if program.buffers[live_range.buffer].kind is BufferKind.ACTIVATION
        and program.buffers[live_range.buffer].nbytes >= min_bytes
        and program.segment_of(live_range.start) != program.segment_of(live_range.uses[-1])
    ]


def streamed(program: Program, ranges: Iterable[LiveRange], ends: Sequence[int], slots: int) -> Iterator[Swap]:
    """Yield the swaps of buffers, in each gap between two uses that the window does not cover.

    Args:
        program: the step.
        ranges: of the buffers.
        ends: of the stretches.
        slots: stretches that are on the device.
    """
    num_ops = len(program.ops)
    around = [end + step * num_ops for step in range(-1, 3) for end in ends]
    for live_range in ranges:
        gaps = list(pairwise(live_range.uses))
        if program.buffers[live_range.buffer].is_persistent:
            gaps.append((live_range.uses[-1], live_range.uses[0] + num_ops))
        is_stale = bool(live_range.writes)  # whether its host copy, if there is one, is not what it holds
        for _ in range(2):  # the first time finds out what holds at the step's start
            found = []
            for after, before in gaps:
                is_stale |= after in live_range.writes
                gap = Gap(live_range.buffer, after, before)
                release, in_start = _absence(program, gap, around, slots, is_copied_out=is_stale)
                if release < in_start:
                    out_start = after + 1 if is_stale else None
                    found.append(Swap(live_range.buffer, "host", 0, out_start, release, in_start, before))
                    is_stale = False
        yield from found


def _absence(program: Program, gap: Gap, around: Sequence[int], slots: int, *, is_copied_out: bool) -> tuple[int, int]:
    """The positions between which a buffer is not on the device in a gap; empty if the window covers it."""
    num_ops = len(program.ops)
    left = bisect_left(around, gap.after + 1) + (slots - 1 if is_copied_out else 0)
    release = around[min(left, len(around) - 1)]
    in_start = around[max(bisect_right(around, gap.before) - slots, 0)]
    if release >= in_start:
        return release, release
    if gap.before >= num_ops:  # no copy is under way at the step's end
        return min(release, max(num_ops, gap.after + 1)), max(in_start, num_ops)
    if program.buffers[gap.buffer].kind is not BufferKind.ACTIVATION:
        return release, in_start
    origin, destination = program.segment_of(gap.after), program.segment_of(gap.before)
    return (0, 0) if origin == destination else (min(release, origin.stop), max(in_start, destination.start))
