"""Baseline "memory_budget": PyTorch's activation_memory_budget, a 0-1 knapsack over saved activations.

As in `choose_saved_values_set` of torch._functorch.partitioners (torch 2.13): of the recomputable values those are kept
whose ops take longest together, within a share of their bytes; the solver is dynamic programming over 10,000ths of the
bytes. The rest is recomputed, once, when the backward first reads it, with those of its inputs that are no longer
resident. Torch leaves ops that Inductor would fuse out of the knapsack, as if they cost nothing; here each op counts
with its seconds.

The share is of bytes kept, not of a peak: the largest twentieth with which the step fits the budget is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.refusal import infeasible
from lmswap.analyze.memory import StepMemory
from lmswap.analyze.repeatable import repeatable_ops
from lmswap.ir.plan import Plan, Recompute
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.build_plan import build_plan
from lmswap.planner.problem import Problem

_PARTS = 10_000  # of all bytes: what a value's size is rounded to
_SHARES = 20  # tried, from all of the bytes down to none


def plan_memory_budget(problem: Problem) -> Plan:
    """Keeps the largest share of the bytes that fits, and within it what takes longest to recompute.

    Raises:
        PlanInfeasible: the step does not fit at any share.
    """
    memory, saved = problem.memory, _SavedActivations(problem.memory.program)
    tried: list[tuple[int, Sequence[Recompute]]] = []
    knapsack = saved.knapsack(memory)
    for share in range(_SHARES, -1, -1):
        kept = saved.values if share == _SHARES else knapsack.best(_PARTS * share // _SHARES)
        recomputes = saved.recomputes(kept)
        peak_bytes = memory.with_recomputes(recomputes)[1].peak.nbytes
        if peak_bytes <= problem.budget_bytes:
            return build_plan(problem, "memory_budget", (), recomputes)
        tried.append((peak_bytes, recomputes))
    raise infeasible(problem, "memory_budget", min(tried, key=lambda one: one[0])[1])


class _SavedActivations:
    """The forward's activations that the backward reads and could recompute, in order, and their recomputes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._producer = {buffer: op.index for op in reversed(program.ops) for buffer in op.writes}
        self._last_use = {buffer: op.index for op in program.ops for buffer in (*op.reads, *op.writes)}
        repeatable = repeatable_ops(program)
        self._recomputable = {
            buffer
            for buffer, op in self._producer.items()
            if repeatable[op] and program.buffers[buffer].kind is BufferKind.ACTIVATION
        }
        self._needs = [(b, op.index) for op in program.ops for b in op.reads if self._is_saved(b, op.index)]
        self.values = list(dict.fromkeys(buffer for buffer, _ in self._needs))

    def _is_saved(self, buffer: int, reader: int) -> bool:
        if buffer not in self._recomputable:
            return False
        origin, here = self._program.segment_of(self._producer[buffer]), self._program.segment_of(reader)
        return origin != here and origin.can_pass_values_to(here)

    def knapsack(self, memory: StepMemory) -> _Knapsack:
        """The knapsack whose weights are the bytes of each activation, and whose values are its op's seconds."""
        nbytes = np.array([self._program.buffers[value].nbytes for value in self.values], np.float64)
        parts = np.rint(nbytes / max(nbytes.sum(), 1.0) * _PARTS).astype(np.int64)
        return _Knapsack(self.values, parts, [memory.costs.seconds[self._producer[value]] for value in self.values])

    def recomputes(self, kept: Collection[int]) -> list[Recompute]:
        """Recomputes of all activations but ``kept``, at their first reader, after those of missing inputs."""
        found: list[Recompute] = []
        present, gone = set(kept), set(self.values) - set(kept)

        def is_missing(buffer: int, position: int) -> bool:
            is_gone = buffer in gone or self._last_use[buffer] < position
            return buffer in self._recomputable and buffer not in present and is_gone

        for buffer, position in self._needs:
            wanted = [buffer]
            while wanted:
                op = self._program.ops[self._producer[wanted[-1]]]
                missing = [each for each in op.reads if is_missing(each, position)]
                if wanted[-1] in present:
                    wanted.pop()
                elif missing:
                    wanted += missing
                else:
                    found.append(Recompute(op.index, position))
                    present.update(op.writes)
        return found


class _Knapsack:
    """0-1 knapsack: the most valuable set for every capacity up to `_PARTS`."""

    def __init__(self, values: Sequence[int], parts: NDArray[np.int64], worths: Sequence[float]) -> None:
        self._values, self._parts = values, parts
        self._takes = np.zeros((len(values), _PARTS + 1), bool)  # [number, capacity], of the values up to that number
        most = np.zeros(_PARTS + 1)
        for number, (size, worth) in enumerate(zip(parts, worths, strict=True)):
            taken = most[: _PARTS + 1 - size] + worth
            self._takes[number, size:] = taken > most[size:]
            most[size:] = np.maximum(most[size:], taken)

    def best(self, capacity: int) -> list[int]:
        """Buffers of the most valuable set within ``capacity`` parts, last first."""
        found = []
        for number in reversed(range(len(self._values))):
            if self._takes[number, capacity]:
                found.append(self._values[number])
                capacity -= int(self._parts[number])
        return found
