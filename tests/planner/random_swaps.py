"""Random plans that keep every rule by construction: any gaps, any positions, each buffer in a place of its own."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from lmswap.analyze.liveness import LiveRange, live_ranges, swappable_gaps
from lmswap.ir.plan import Plan, Swap
from tests.ir.build import Step


@st.composite
def random_plans(draw: st.DrawFn, step: Step) -> Plan:
    program = step.program
    ranges = live_ranges(program)
    swaps: list[Swap] = []
    offset = 0
    for buffer in program.buffers:
        if buffer.is_shared and buffer.nbytes and buffer.id in ranges:
            swaps += draw(_swaps_of_shared(ranges[buffer.id], len(program.ops), offset, is_cyclic=buffer.is_persistent))
            offset += -(-buffer.nbytes // 4096) * 4096
    copies: dict[int, tuple[int, int]] = {}  # buffer: out_start and next use of its last swap
    for gap in swappable_gaps(program, ranges, 0):
        if not draw(st.booleans()):
            continue
        origin, destination = program.segment_of(gap.after), program.segment_of(gap.before)
        writes = ranges[gap.buffer].writes
        last_write = max(write for write in writes if write <= gap.after)
        copied, returned = copies.get(gap.buffer, (-1, -1))
        # A backward that follows its forward at once takes the buffer over until its copy has ended.
        takes_over = origin != destination and origin.stop == destination.start
        latest = gap.before if takes_over else min(gap.before, origin.stop)
        is_good = copied > last_write and origin.start <= returned
        if is_good and draw(st.booleans()):
            out_start = None
            release = draw(st.integers(gap.after + 1, min(gap.before, origin.stop)))
        else:
            earliest = max(last_write + 1, origin.start, returned)
            copied = out_start = draw(st.integers(earliest, min(gap.before, origin.stop)))
            release = draw(st.integers(max(out_start, gap.after + 1), latest))
        in_start = draw(st.integers(max(release, destination.start), gap.before))
        first_use = draw(st.integers(in_start, gap.before))
        if gap.buffer not in copies:
            offset += -(-program.buffers[gap.buffer].nbytes // 4096) * 4096
        copies[gap.buffer] = (copied, first_use)
        place = offset - -(-program.buffers[gap.buffer].nbytes // 4096) * 4096
        swaps.append(Swap(gap.buffer, "host", place, out_start, release, in_start, first_use))
    swaps.sort(key=lambda swap: swap.first_use % len(program.ops))
    return Plan("random", 2**40, tuple(swaps), 0.0, 0, {"host": offset})


@st.composite
def _swaps_of_shared(draw: st.DrawFn, live: LiveRange, num_ops: int, offset: int, *, is_cyclic: bool) -> list[Swap]:
    """Swaps of a buffer that every segment can use; of a cyclic one from its last write through the next step."""
    uses = list(live.uses)
    if is_cyclic:
        first = uses.index(live.writes[-1]) if live.writes else 0
        uses = uses[first:] + [use + num_ops for use in uses[: first + 1]]
    writes = [use for use in uses if use % num_ops in live.writes]
    swaps: list[Swap] = []
    returned, copied = 0, -1  # the last first_use and out_start
    if not writes:
        copied = 2 * num_ops  # there is a host copy for good
    for after, before in pairwise(uses):
        if before == after + 1 or draw(st.booleans()):
            continue
        step_start = after // num_ops * num_ops
        last_write = max((write for write in writes if write <= after), default=uses[0])
        if copied > last_write and draw(st.booleans()):
            out_start, start = None, after + 1
        else:
            out_start = start = draw(st.integers(max(last_write + 1, returned, step_start), before))
        release = draw(st.integers(max(start, after + 1), before))
        in_start = draw(st.integers(release, before))
        first_use = draw(st.integers(in_start, before))
        step_end = step_start + num_ops
        start = release if out_start is None else out_start
        is_under_way = start < step_end <= first_use and not release <= step_end <= in_start
        if is_under_way or first_use >= start + num_ops:
            continue
        copied, returned = copied if out_start is None else out_start, first_use
        shift = step_start if first_use <= step_end else 0  # positions count from the step in which it leaves
        swaps.append(
            Swap(
                live.buffer,
                "host",
                offset,
                None if out_start is None else out_start - shift,
                release - shift,
                in_start - shift,
                first_use - shift,
            )
        )
    return swaps
