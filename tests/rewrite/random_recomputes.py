"""Random recomputes that are valid by construction: ops that can run twice, at any positions where they can run."""

from __future__ import annotations

import random

from lmswap.analyze.repeatable import repeatable_ops
from lmswap.ir.plan import Recompute
from lmswap.ir.program import Program


def random_recomputes(
    program: Program, rng: random.Random, *, share: float = 0.5, most: int = 3
) -> tuple[Recompute, ...]:
    """About ``share`` of the recomputable ops are recomputed, up to ``most`` times each."""
    recomputes = []
    for op, is_repeatable in zip(program.ops, repeatable_ops(program), strict=True):
        if not is_repeatable or rng.random() > share:
            continue
        origin = program.segment_of(op.index)
        places = [
            position
            for segment in program.segments
            if origin.can_pass_values_to(segment)
            for position in range(max(op.index + 1, segment.start), segment.stop)
        ]
        recomputes += [
            Recompute(op.index, place) for place in rng.sample(places, min(len(places), rng.randint(1, most)))
        ]
    rng.shuffle(recomputes)
    return tuple(sorted(recomputes, key=lambda recompute: recompute.position))


def recompute_all(program: Program) -> tuple[Recompute, ...]:
    """Before each op of a backward pass, all of its inputs are recomputed from what cannot be."""
    can_run = repeatable_ops(program)
    maker = {buffer: op.index for op in reversed(program.ops) for buffer in op.writes}
    recomputes: list[Recompute] = []
    for op in program.ops:
        if program.segment_of(op.index).phase != "backward":
            continue
        needed: set[int] = set()
        pending = list(op.reads)
        while pending:
            made_by = maker.get(pending.pop())
            if made_by is None or made_by in needed or not can_run[made_by]:
                continue
            if program.segment_of(made_by).phase == "forward":
                needed.add(made_by)
                pending += program.ops[made_by].reads
        recomputes += [Recompute(earlier, op.index) for earlier in sorted(needed)]
    return tuple(recomputes)
