"""Weights that move are non-resident between steps: the swaps of a cyclic step → swaps that leave none in memory.

Between steps a weight that moves has its bytes in its host copy only, where the caller reads and writes it. A search
may keep it over the step's end, or prefetch it for the next step before this one ends: then it is fetched when the next
step has begun. A graph fetches its own weights, so that no prefetch begins before the segment that needs it. Both only
delay prefetches and advance releases, so that the step takes no more memory; it may take longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lmswap.analyze.liveness import segment_by_op
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.schedule import schedule
from lmswap.planner.problem import Problem


def without_weights_between_steps(plan: Plan, program: Program) -> Plan:
    """``plan`` with every weight that moves non-resident at the step's end; its prediction is kept.

    Args:
        plan: of ``program``, whose weights are only read.
        program: the planned step.
    """
    weights = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.WEIGHT}
    moved: dict[int, list[Swap]] = defaultdict(list)
    others: list[Swap] = []
    for swap in plan.swaps:
        (moved[swap.buffer] if swap.buffer in weights else others).append(swap)
    if not moved:
        return plan
    runs = schedule(program, plan.recomputes).program
    uses: dict[int, list[int]] = {buffer: [] for buffer in moved}
    for op in runs.ops:
        for buffer in uses.keys() & {*op.reads}:
            uses[buffer].append(op.index)
    starts = [segment.start for segment in segment_by_op(runs)]
    fetched = [each for buffer, swaps in moved.items() for each in _fetches(swaps, uses[buffer], starts)]
    swaps = sorted((*others, *fetched), key=lambda swap: swap.first_use % len(runs.ops))  # by need; stable
    return replace(plan, swaps=tuple(swaps))


def fetch_weights(problem: Problem) -> list[Swap]:
    """The swaps by which each weight that is only read is resident from a use to the next one only if they follow."""
    program, num_ops = problem.memory.program, len(problem.memory.program.ops)
    found: list[Swap] = []
    for buffer, live_range in problem.memory.ranges.items():
        kind, uses = program.buffers[buffer].kind, live_range.uses
        is_small = program.buffers[buffer].nbytes < problem.min_swap_bytes
        if kind is not BufferKind.WEIGHT or live_range.writes or is_small or not uses:
            continue
        for last, following in pairwise((*uses, num_ops + uses[0])):
            if following > last + 1:
                found.append(Swap(buffer, problem.tier.name, 0, None, last + 1, following, following))
    return found


def _fetches(swaps: Sequence[Swap], uses: Sequence[int], starts: Sequence[int]) -> list[Swap]:
    """The swaps of one weight: ``swaps`` released at once and fetched late enough, and one over the step's end.

    ``uses`` are the ops that read it, ``starts`` by op the first of its segment.
    """
    num_ops, first, last = len(starts), uses[0], uses[-1]
    within = [swap for swap in swaps if swap.first_use < num_ops]
    over_end = next((swap for swap in swaps if swap.first_use >= num_ops), replace(swaps[0], in_start=0))
    fetched = [
        replace(
            swap,
            release=1 + max(use for use in uses if use < swap.release),
            in_start=max(swap.in_start, starts[swap.first_use]),
        )
        for swap in within
    ]
    in_start = max(over_end.in_start, num_ops + starts[first])
    return [*fetched, replace(over_end, release=last + 1, in_start=in_start, first_use=num_ops + first)]
