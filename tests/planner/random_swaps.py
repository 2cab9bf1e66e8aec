"""Random plans that keep every rule by construction: any gaps, any positions, each buffer in a place of its own."""

from __future__ import annotations

from hypothesis import strategies as st

from lmswap.analyze.liveness import live_ranges, swappable_gaps
from lmswap.ir.plan import Plan, Swap
from tests.ir.build import Step


@st.composite
def random_plans(draw: st.DrawFn, step: Step) -> Plan:
    program = step.program
    ranges = live_ranges(program)
    swaps: list[Swap] = []
    offset = 0
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
    swaps.sort(key=lambda swap: swap.first_use)
    return Plan("random", 2**40, tuple(swaps), 0.0, 0, {"host": offset})
