"""Random plans that are valid by construction: any gap of any buffer, any positions that the rules allow."""

from __future__ import annotations

import itertools
import random

from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Program


def random_plan(program: Program, rng: random.Random, *, share: float = 0.7, tier: str = "disk") -> Plan:
    """A plan that swaps about ``share`` of all gaps, each in its own place of the tier."""
    swaps: list[Swap] = []
    offset = stop = 0
    for buffer in program.buffers:
        if not buffer.is_swappable or buffer.nbytes == 0:
            continue
        has_copy = False
        offset, stop = stop, stop + -(-buffer.nbytes // 4096) * 4096
        uses = [op.index for op in program.ops if buffer.id in (*op.reads, *op.writes)]
        for before, after in itertools.pairwise(uses):
            here, there = program.segment_of(before), program.segment_of(after)
            has_copy = has_copy and buffer.id not in program.ops[before].writes
            if rng.random() > share:
                has_copy = has_copy and here == there  # the token does not cross beside a kept tensor
                continue
            out_start = rng.randint(before + 1, min(here.stop, after))
            keep_copy = has_copy and rng.random() < 0.7
            takes_over = here.can_pass_values_to(there) and here.stop == there.start
            is_late = takes_over and not keep_copy and rng.random() < 0.5  # it waits for a copy out
            release = rng.randint(out_start, after if is_late else min(here.stop, after))
            in_start = rng.randint(max(release, there.start), after)
            swaps.append(Swap(buffer.id, tier, offset, None if keep_copy else out_start, release, in_start, after))
            has_copy = True
    rng.shuffle(swaps)
    swaps.sort(key=lambda swap: swap.release if swap.out_start is None else swap.out_start)
    return Plan("random", 2**62, tuple(swaps), 0.0, 0, {tier: stop})
