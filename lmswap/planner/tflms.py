"""Policy "tflms": IBM's TFLMS v2, which swaps between producers and consumers that are far apart in the graph.

After Le, Imai, Negishi and Kawachiya, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting"
(arXiv 1807.02037) and "Automatic GPU memory management for large neural models in TensorFlow" (ISMM 2019). Distances
are topological levels, not bytes or seconds, which is the method's weakness. Two things differ: the budget is in bytes
and enforced, and the tuning is scored by lmswap's simulator, in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lmswap.analyze.liveness import Gap
from lmswap.errors import OptionError
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.build_plan import build_plan
from lmswap.planner.problem import Problem
from lmswap.planner.schedule_copies import schedule_copies
from lmswap.planner.simulate import simulate_swaps

TUNED = -1


def plan_tflms(
    problem: Problem,
    *,
    swapout_threshold: int = TUNED,
    swapin_ahead: int = TUNED,
    swapin_groupby: int = TUNED,
    sync_mode: int = 0,
) -> Plan:
    """Swaps a buffer for every consumer that is more than a number of levels below its producer.

    Args:
        problem: what to plan.
        swapout_threshold: that number of levels. -1: the largest that fits the budget.
        swapin_ahead: levels before the consumer at which the copy in starts. -1: the fastest in simulation.
        swapin_groupby: consumers closer than this many levels share one copy in. -1: the fastest in simulation.
        sync_mode: 0 asynchronous; 1 compute waits for each copy out; 2 for each copy in; 3 for both.

    Raises:
        OptionError: a parameter is out of its range.
        PlanInfeasible: the given threshold, or any, does not fit the budget.
    """
    for name, given in (("swapout_threshold", swapout_threshold), ("swapin_ahead", swapin_ahead)):
        if given < TUNED:
            raise OptionError(f"{name} must be a number of levels, or -1 to have it tuned, not {given}")
    if swapin_groupby != TUNED and swapin_groupby < 1:
        raise OptionError(f"swapin_groupby must be at least 1 level, or -1 to have it tuned, not {swapin_groupby}")
    if sync_mode not in range(4):
        raise OptionError(f"sync_mode must be 0, 1, 2 or 3, not {sync_mode}")
    requested = _Parameters(swapout_threshold, swapin_ahead, swapin_groupby, sync_mode)
    return build_plan(problem, "tflms", _Tflms(problem).tune(requested))


@dataclass(frozen=True)
class _Parameters:
    threshold: int
    ahead: int
    groupby: int
    sync_mode: int


class _Tflms:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._levels = np.array(levels(problem.memory.program), np.int64)
        self._deepest = int(self._levels.max(initial=0))
        self._allowed = set(problem.gaps)
        self._buffers = sorted({gap.buffer for gap in problem.gaps})

    def tune(self, given: _Parameters) -> tuple[Swap, ...]:
        """Tunes in IBM's order: threshold, then ahead, then groupby; returns the swaps."""
        tuned = replace(
            given,
            ahead=1 if given.ahead == TUNED else given.ahead,
            groupby=1 if given.groupby == TUNED else given.groupby,
        )
        if given.threshold == TUNED:
            tuned = replace(tuned, threshold=self._largest_threshold(tuned.groupby))
        if not self._problem.fits(self._gaps(tuned)):
            raise self._problem.infeasible("tflms", self._gaps(tuned))
        swaps = self._swaps(tuned)
        if given.ahead == TUNED:
            tuned, swaps = self._fastest(replace(tuned, ahead=ahead) for ahead in _ladder(self._deepest))
        if given.groupby == TUNED:
            tuned, swaps = self._fastest(replace(tuned, groupby=groupby) for groupby in _ladder(self._deepest))
        return swaps

    def _largest_threshold(self, groupby: int) -> int:
        """A larger threshold swaps less, so those that fit are the ones below some number; 0 if none fits."""

        def is_too_large(threshold: int) -> bool:
            return not self._problem.fits(self._gaps(_Parameters(threshold, 1, groupby, 0)))

        return max(0, bisect_left(range(self._deepest + 1), True, key=is_too_large) - 1)

    def _fastest(self, candidates: Iterator[_Parameters]) -> tuple[_Parameters, tuple[Swap, ...]]:
        problem = self._problem
        fitting = ((found, self._swaps(found)) for found in candidates if problem.fits(self._gaps(found)))
        return min(fitting, key=lambda found: simulate_swaps(problem.memory, problem.machine, found[1]).seconds)

    def _gaps(self, parameters: _Parameters) -> tuple[Gap, ...]:
        """The gaps that end at a distant consumer, except those that share an earlier consumer's copy in."""
        found = []
        for buffer in self._buffers:
            uses = self._problem.memory.ranges[buffer].uses
            produced, group = self._levels[uses[0]], None
            for after, before in pairwise(uses):
                level = self._levels[before]
                if level - produced <= parameters.threshold:
                    continue
                if group is None or level - group >= parameters.groupby:
                    group = level
                    found.append(Gap(buffer, after, before))
        return tuple(gap for gap in found if gap in self._allowed)

    def _swaps(self, parameters: _Parameters) -> tuple[Swap, ...]:
        gaps = self._gaps(parameters)
        return schedule_copies(
            self._problem,
            gaps,
            preferred_starts={gap: self._preferred_start(gap, parameters.ahead) for gap in gaps},
            sync_out=parameters.sync_mode in (1, 3),
            sync_in=parameters.sync_mode in (2, 3),
        )

    def _preferred_start(self, gap: Gap, ahead: int) -> int:
        """The first position after the gap's begin whose op is at most ``ahead`` levels above the consumer."""
        start = max(gap.after + 1, self._problem.segments[gap.before].start)
        near = self._levels[start : gap.before + 1] >= self._levels[gap.before] - ahead
        return start + int(near.argmax())


def levels(program: Program) -> tuple[int, ...]:
    """Length of the longest path to each op, by op.

    What happens between forward and backward is outside the program, so an op that reads a tangent counts as one level
    below everything in the segments before its own: the loss that the tangent comes from depends on their outputs.
    """
    graph = program.to_networkx()
    found: list[int] = []
    for segment in program.segments:
        deepest_before = max(found, default=-1)
        for op in program.ops[segment.start : segment.stop]:
            level = max((found[earlier] for earlier in graph.predecessors(op.index)), default=-1)
            if any(program.buffers[buffer].kind is BufferKind.TANGENT for buffer in op.reads):
                level = max(level, deepest_before)
            found.append(level + 1)
    return tuple(found)


def _ladder(deepest: int) -> Iterator[int]:
    level = 1
    while level <= max(deepest, 1):
        yield level
        level *= 4
