"""Shorter residencies of swapped buffers: plan → the same swaps, released earlier and prefetched later.

A search releases memory where an op needs it, and prefetches as soon as memory is free: otherwise unused memory
compensates for a slow link. But then the device is full at every moment, and cannot be packed without fragmentation.
Using free time to shorten residencies leaves little fragmentation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmswap.analyze.memory import StepMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Program
from lmswap.ir.timeline import Lane, Span
from lmswap.planner.problem import PLANNED_LINK_SHARE
from lmswap.planner.simulate import simulate_swaps


def shrink_residency(plan: Plan, program: Program, costs: OpCosts, machine: Machine, *, share: float) -> Plan:
    """``plan`` with shorter residencies, unchanged if ``share`` is 0; its prediction is kept.

    Each release and prefetch is moved by ``share`` of the way to where, on a link of `PLANNED_LINK_SHARE` of its rate,
    the copy out has just ended, or the copy in arrives just in time or no later than before.

    Args:
        plan: a plan for the following.
        program: the planned step.
        costs: of its ops.
        machine: with the plan's tier.
        share: 0 to 1, of the free time to use.
    """
    if not share:
        return plan
    _, memory = StepMemory(program, costs).with_recomputes(plan.recomputes)
    spans = simulate_swaps(memory, machine.with_links_at(PLANNED_LINK_SHARE), plan.swaps).spans
    out_ends = _out_ends(plan.swaps, spans)
    reached = [0.0, *(span.end_seconds for span in _on(Lane.COMPUTE, spans))]  # by position: when all before it has run
    released = [
        replace(swap, release=_between(swap.release, _earliest_release(swap, memory, reached, end), share))
        for swap, end in zip(plan.swaps, out_ends, strict=True)
    ]
    for swap, end in zip(plan.swaps, out_ends, strict=True):
        reached[swap.release] = max(reached[swap.release], end)  # prefetches are queued after all releases
    in_starts = _latest_in_starts(plan.swaps, spans, reached, share)
    swaps = (replace(swap, in_start=in_start) for swap, in_start in zip(released, in_starts, strict=True))
    return replace(plan, swaps=tuple(swaps))


def _out_ends(swaps: Sequence[Swap], spans: Sequence[Span]) -> list[float]:
    """By swap: the end of its copy out; 0 where an earlier host copy is valid."""
    queue = sorted((swap.out_start, number) for number, swap in enumerate(swaps) if swap.out_start is not None)
    ends = [0.0] * len(swaps)
    for (_, number), copy in zip(queue, _on(Lane.OUT, spans), strict=True):
        ends[number] = copy.end_seconds
    return ends


def _earliest_release(swap: Swap, memory: StepMemory, reached: Sequence[float], out_end: float) -> int:
    last_use = max(use for use in memory.ranges[swap.buffer].uses if use < swap.release)
    return min(swap.release, max(last_use + 1, swap.out_start or 0, bisect_left(reached, out_end)))


def _latest_in_starts(swaps: Sequence[Swap], spans: Sequence[Span], queued: Sequence[float], share: float) -> list[int]:
    """By swap, computed from the last copy to the first: each must end before the next one has to start.

    ``queued`` is, by position, when its prefetches are queued.
    """
    starts = [*(span.start_seconds for span in _on(Lane.COMPUTE, spans)), queued[-1]]
    num_ops = len(starts) - 1
    fetches = [swap.fetch(num_ops) for swap in swaps]
    queue = sorted(range(len(swaps)), key=lambda number: fetches[number])
    found = [swap.in_start for swap in swaps]
    next_start, next_position = starts[-1], len(starts)
    for number, copy in zip(reversed(queue), reversed([*_on(Lane.IN, spans)]), strict=True):
        in_start, first_use = fetches[number]
        due = min(next_start, max(starts[first_use], copy.end_seconds))
        next_start = max(due - copy.seconds, copy.start_seconds)
        latest = max(in_start, min(bisect_right(queued, next_start) - 1, first_use))
        next_position = min(next_position, _between(in_start, latest, share))
        found[number] += next_position - in_start  # of the next step, where that fetches it
    return found


def _on(lane: Lane, spans: Sequence[Span]) -> Iterator[Span]:
    return (span for span in spans if span.lane is lane)


def _between(position: int, other: int, share: float) -> int:
    return position + round(share * (other - position))
