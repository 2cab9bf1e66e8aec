"""Why does each buffer stay or go? Finished swaps → a short sentence in numbers for every buffer."""

from __future__ import annotations

from collections.abc import Sequence

from lmswap.analyze.liveness import gaps
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Swap
from lmswap.ir.program import Buffer, BufferKind
from lmswap.ir.schedule import Schedule
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.plan.problem import Problem

_REASON_BY_KIND = {
    BufferKind.PARAMETER: "keep: a parameter, it lives outside the step",
    BufferKind.INPUT: "keep: an input, the caller holds it",
    BufferKind.OUTPUT: "keep: shares memory with an output",
    BufferKind.TANGENT: "keep: a tangent, the caller holds it",
    BufferKind.GRADIENT: "keep: a gradient, it is handed out",
}


def find_reasons(problem: Problem, runs: Schedule, swaps: Sequence[Swap], timeline: Timeline) -> dict[int, str]:
    """For each buffer, by id, why the plan swaps or keeps it; idle times are those of ``timeline``."""
    compute = [span for span in timeline.spans if span.lane is Lane.COMPUTE]
    swapped: dict[int, list[Swap]] = {}
    for swap in swaps:
        swapped.setdefault(swap.buffer, []).append(swap)
    return {
        buffer.id: _swap_reason(problem, swapped[buffer.id], compute)
        if buffer.id in swapped
        else _keep_reason(problem, buffer)
        for buffer in problem.memory.program.buffers
    }


def _swap_reason(problem: Problem, swaps: Sequence[Swap], compute: Sequence[Span]) -> str:
    buffer = swaps[0].buffer
    nbytes, link = problem.nbytes(buffer), problem.link
    uses = problem.memory.ranges[buffer].uses
    idle_seconds = sum(
        compute[min(use for use in uses if use >= swap.first_use)].start_seconds
        - compute[max(use for use in uses if use < swap.release)].end_seconds
        for swap in swaps
    )
    trips = f" in {len(swaps)} gaps" if len(swaps) > 1 else ""
    return (
        f"swap: {format_bytes(nbytes)} idle for {1e3 * idle_seconds:.1f} ms{trips}, "
        f"copy {1e3 * link.out_rate.seconds(nbytes):.1f} ms out and {1e3 * link.in_rate.seconds(nbytes):.1f} ms in"
    )


def _keep_reason(problem: Problem, buffer: Buffer) -> str:
    if not buffer.is_swappable:
        return _REASON_BY_KIND[buffer.kind]
    live_range = problem.memory.ranges.get(buffer.id)
    if live_range is None or not gaps(live_range):
        return "keep: never idle between its uses"
    if buffer.nbytes < problem.min_swap_bytes:
        return f"keep: {format_bytes(buffer.nbytes)} is under min_swap_bytes"
    return f"keep: {format_bytes(buffer.nbytes)} fits the budget"
