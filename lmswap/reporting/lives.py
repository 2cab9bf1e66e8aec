"""When does each buffer lie on the device, by a plan? Program + plan + predicted timeline → seconds, for people."""

from __future__ import annotations

from collections import defaultdict

from lmswap.analyze.liveness import live_ranges
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Timeline

Lives = dict[int, tuple[tuple[float, float], ...]]  # by buffer of the program: (start, end), in seconds of the step


def lives(program: Program, plan: Plan, predicted: Timeline) -> Lives:
    """From when to when each buffer of the step takes memory; one that is away meanwhile has several times."""
    runs = schedule(program, plan.reruns)
    begins = [span.start_seconds for span in predicted.spans if span.lane is Lane.COMPUTE]  # by op
    begins.append(predicted.seconds)
    away: dict[int, list[Swap]] = defaultdict(list)
    for swap in sorted(plan.swaps, key=lambda swap: swap.release):
        away[swap.buffer].append(swap)
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for buffer, live in live_ranges(runs.program).items():
        edges = [live.start, *(edge for swap in away[buffer] for edge in (swap.release, swap.in_start)), live.stop]
        times = [begins[edge] for edge in edges]
        found[runs.buffers[buffer]] += zip(times[::2], times[1::2], strict=True)
    return {buffer: tuple(sorted(times)) for buffer, times in found.items()}
