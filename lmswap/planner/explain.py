"""The reason for each buffer's action, as a sentence with its figures: problem and plan → text by buffer."""

from __future__ import annotations

from lmswap.analyze.liveness import gaps
from lmswap.analyze.repeatable import exposed_buffers
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Buffer, BufferKind
from lmswap.ir.timeline import Lane
from lmswap.planner.problem import Problem

_REASON_BY_KIND = {
    BufferKind.PARAMETER: "keep: a parameter, it lives outside the step",
    BufferKind.INPUT: "keep: an input, the caller holds it",
    BufferKind.OUTPUT: "keep: shares memory with an output",
    BufferKind.TANGENT: "keep: a tangent, the caller holds it",
    BufferKind.GRADIENT: "keep: a gradient, it is returned",
    BufferKind.ACCUMULATED_GRADIENT: "keep: a gradient, it is added to the caller's",
}


def explain_plan(problem: Problem, plan: Plan) -> dict[int, str]:
    """For each buffer of the planned program, by id: its action under ``plan`` and the cost of that."""
    return _Explainer(problem, plan).sentences()


class _Explainer:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        runs, memory = problem.with_recomputes(plan.recomputes)
        timeline = problem.timeline(plan.swaps, plan.recomputes)
        self._problem, self._memory, self._step_seconds = problem, memory, timeline.seconds
        self._compute = [span for span in timeline.spans if span.lane is Lane.COMPUTE]
        self._swaps: dict[int, list[Swap]] = {}
        for swap in plan.swaps:
            self._swaps.setdefault(runs.buffers[swap.buffer], []).append(swap)
        self._stall_seconds: dict[int, float] = {}
        for span in timeline.spans:
            if span.lane is Lane.STALL and span.buffer is not None:
                origin = runs.buffers[span.buffer]
                self._stall_seconds[origin] = self._stall_seconds.get(origin, 0.0) + span.seconds
        read = {buffer for op in runs.program.ops for buffer in op.reads}
        self._recomputes: dict[int, list[int]] = {}  # by buffer: its recomputes that are read
        for run, op in zip(runs.program.ops, runs.ops, strict=True):
            for buffer, origin in zip(run.writes, problem.memory.program.ops[op].writes, strict=True):
                if buffer != origin and buffer in read:
                    self._recomputes.setdefault(origin, []).append(run.index)
        self._repeatable = problem.memory.repeatable
        self._exposed = exposed_buffers(problem.memory.program)
        self._producer = {b: op.index for op in reversed(problem.memory.program.ops) for b in op.writes}

    def sentences(self) -> dict[int, str]:
        return {buffer.id: self._sentence(buffer) for buffer in self._problem.memory.program.buffers}

    def _sentence(self, buffer: Buffer) -> str:
        if buffer.id in self._swaps:
            return self._swap(buffer)
        if buffer.id in self._recomputes:
            return self._recompute(buffer)
        if not buffer.is_swappable:
            return _REASON_BY_KIND[buffer.kind]
        live_range = self._problem.memory.ranges.get(buffer.id)
        if live_range is None or not (gaps(live_range) or buffer.is_persistent):
            return "keep: never idle between its uses"
        return f"keep: {format_bytes(buffer.nbytes)} fits the budget"

    def _swap(self, buffer: Buffer) -> str:
        swaps, link = self._swaps[buffer.id], self._problem.link
        idle_seconds = sum(self._idle_seconds(swap) for swap in swaps)
        stall_seconds = self._stall_seconds.get(buffer.id, 0.0)
        exposed = f"compute waits {_ms(stall_seconds)}" if stall_seconds else "hidden"
        in_gaps = f" in {len(swaps)} gaps" if len(swaps) > 1 else ""
        out_seconds, in_seconds = (rate.seconds(buffer.nbytes) for rate in (link.out_rate, link.in_rate))
        is_read_only = all(swap.out_start is None for swap in swaps)
        copies = f"copy {'' if is_read_only else f'{_ms(out_seconds)} out and '}{_ms(in_seconds)} in"
        sentence = f"swap: {format_bytes(buffer.nbytes)} idle {_ms(idle_seconds)}{in_gaps}, {copies}, {exposed}"
        return sentence if buffer.is_shared else f"{sentence}; {self._instead_of_swap(self._producer[buffer.id])}"

    def _instead_of_swap(self, producer: int) -> str:
        if self._repeatable[producer]:
            return f"recompute would cost {_ms(self._problem.memory.costs.seconds[producer])}"
        return f"it cannot be recomputed{self._why_not(producer)}"

    def _why_not(self, producer: int) -> str:
        program = self._problem.memory.program
        exposed = next((buffer for buffer in program.ops[producer].reads if buffer in self._exposed), None)
        return f", as the caller may write '{program.buffer_names[exposed]}' before" if exposed is not None else ""

    def _recompute(self, buffer: Buffer) -> str:
        recomputes, link = self._recomputes[buffer.id], self._problem.link
        seconds = sum(self._memory.costs.seconds[run] for run in recomputes)
        times = f" {len(recomputes)} times" if len(recomputes) > 1 else ""
        if buffer.nbytes < self._problem.min_swap_bytes:
            instead = "under min_swap_bytes"
        else:
            copies = link.out_rate.seconds(buffer.nbytes) + link.in_rate.seconds(buffer.nbytes)
            instead = f"a swap would take {_ms(copies)} of the link"
        return f"recompute: {format_bytes(buffer.nbytes)} recomputed{times} in {_ms(seconds)}; {instead}"

    def _idle_seconds(self, swap: Swap) -> float:
        num_ops = len(self._memory.program.ops)
        around = (0, num_ops, -num_ops) if self._memory.program.buffers[swap.buffer].is_persistent else (0,)
        uses = [use + shift for use in self._memory.ranges[swap.buffer].uses for shift in around]
        last = max(use for use in uses if use < swap.release)
        following = min(use for use in uses if use >= swap.first_use)
        steps = following // num_ops - last // num_ops
        seconds = steps * self._step_seconds + self._compute[following % num_ops].start_seconds
        return seconds - self._compute[last % num_ops].end_seconds


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
