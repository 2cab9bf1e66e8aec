"""Times at which each buffer is resident under a plan, in seconds of a predicted or measured timeline."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, groupby

from lmswap.analyze.liveness import live_ranges
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Span, Timeline

# By buffer of the program: (start, end), in seconds of the step.
ResidentIntervals = dict[int, tuple[tuple[float, float], ...]]


def resident_intervals(
    program: Program, plan: Plan, predicted: Timeline, measured: Timeline | None = None
) -> tuple[ResidentIntervals, str]:
    """Return the resident intervals of each buffer of the step; a swapped or recomputed one has several.

    Also returns whose seconds these are: those of ``measured`` if its passes are the plan's. Within a pass, whose ops
    are not timed in each step, compute proceeds as predicted.
    """
    runs = schedule(program, plan.recomputes)
    begins = [span.start_seconds for span in predicted.spans if span.lane is Lane.COMPUTE]  # by op
    begins.append(predicted.seconds)
    clock = predicted
    if measured is not None and (as_measured := _measured_op_starts(runs.program, predicted, measured)) is not None:
        begins, clock = as_measured, measured
    absences: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for swap in plan.swaps:
        absences[swap.buffer] += swap.absences(len(runs.program.ops))
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for buffer, live in live_ranges(runs.program).items():
        edges = [live.start, *(edge for absence in sorted(absences[buffer]) for edge in absence), live.stop]
        found[runs.buffers[buffer]] += (
            (begins[start], begins[stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop
        )
    return {buffer: tuple(sorted(times)) for buffer, times in found.items()}, clock.source


def _measured_op_starts(program: Program, predicted: Timeline, measured: Timeline) -> list[float] | None:
    """Return when each op began in ``measured``, and when the last ended; None where other passes ran than planned."""
    compute = [span for span in measured.spans if span.lane is Lane.COMPUTE]
    passes = [list(spans) for _, spans in groupby(compute, key=lambda span: span.name)]
    if [spans[0].name.partition(" ")[0] for spans in passes] != [segment.phase for segment in program.segments]:
        return None
    op_seconds = [span.seconds for span in predicted.spans if span.lane is Lane.COMPUTE]
    begins: list[float] = []
    for segment, spans in zip(program.segments, passes, strict=True):
        passed = list(accumulate(op_seconds[segment.start : segment.stop], initial=0.0))
        begins += [_within(spans, before / (passed[-1] or 1.0)) for before in passed[:-1]]
    return [*begins, compute[-1].end_seconds]


def _within(spans: Sequence[Span], share: float) -> float:
    """Return when ``share`` of the seconds of ``spans`` had passed."""
    passed = list(accumulate((span.seconds for span in spans), initial=0.0))
    at = share * passed[-1]
    which = min(bisect_right(passed, at), len(spans)) - 1
    return spans[which].start_seconds + at - passed[which]
