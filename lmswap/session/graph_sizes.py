"""The sizes that a graph's plan serves besides those that it was made for, and its step for other sizes.

A plan for larger sizes fits, but moves more than needed. It serves a bucket of smaller ones at once, without a pause,
until its steps have lost as many seconds that way as making a plan takes: at most twice what they would have lost had
their number been known.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from lmswap.analyze.memory import StepMemory
from lmswap.capture.caller_memory import tangent_bytes
from lmswap.capture.lower import Lowered
from lmswap.capture.size_buckets import bucket_edge
from lmswap.capture.specialize import SizesOutgrown
from lmswap.ir.costs import OpCosts
from lmswap.ir.plan import Plan
from lmswap.ir.program import LOSS, Op, Program
from lmswap.ir.schedule import schedule
from lmswap.planner import simulate
from lmswap.session.planned_step import Phase, PlannedStep
from lmswap.torch_compat.sized_graphs import is_sized
from lmswap.torch_compat.symbolic_sizes import BufferGrowth, Sizes, SymbolicRegion

_MAX_FITTING = 1024  # sizes that are known to fit: numbers may be new in each step
_MAX_LESS = 4  # by which the largest sizes of a bucket that can be planned are searched below its edge
# A plan serves sizes of other buckets, too, if without swaps they take nearly the memory that it is made for.
_NEAR = 1.1
# Seconds of an op are known from sizes whose steps take up to this factor more or fewer bytes: those of the next bucket
# are at most 1.25 times as large, and take at most the square of that.
_SIMILAR = 1.6


class BorrowedPlans:
    """What each bucket of sizes of one trace has lost to plans for larger ones."""

    def __init__(self) -> None:
        self.planning_seconds = 0.0  # of the last plan that was made for the trace
        self._lost_seconds: dict[Hashable, float] = {}

    def note_run(self, sizes: Sizes, lost_seconds: float) -> None:
        """Count a run of ``sizes``, which took ``lost_seconds`` longer than in unlimited memory."""
        bucket = _bucket(sizes)
        self._lost_seconds[bucket] = self._lost_seconds.get(bucket, 0.0) + lost_seconds

    def have_cost_a_plan(self, sizes: Sizes) -> bool:
        """Whether the bucket of ``sizes`` has lost as much as it takes to make a plan for it."""
        return self._lost_seconds.get(_bucket(sizes), 0.0) > self.planning_seconds


def _bucket(sizes: Sizes) -> Hashable:
    return frozenset((symbol, bucket_edge(size)) for symbol, size in sizes.items())


class GraphSizes:
    """The sizes of one graph: of its program, of its plan and of its last run; none if all are constants."""

    def __init__(self, symbolic: SymbolicRegion | None) -> None:
        self.symbolic = symbolic  # the region of all graphs of one trace
        self.program: Program
        self._growth: BufferGrowth  # of its buffers
        self.of_program: Sizes = symbolic.sizes if symbolic is not None else {}
        self.of_plan = self.of_run = self.of_program
        self.are_kept = True  # the graph's code runs with those of each call
        # Other sizes that its plan has room for; by these, the seconds that a run loses to moves for larger sizes.
        self.fitting: dict[frozenset[Any], float] = {}
        self.borrowed = BorrowedPlans()  # of all graphs of its trace

    @property
    def vary(self) -> bool:
        """Whether the trace serves other sizes."""
        return self.symbolic is not None

    def for_other_graph(self, sizes: Sizes | None = None) -> GraphSizes:
        """Return those of another graph of the trace, planned for ``sizes``; by default for those of this one."""
        other = copy.copy(self)
        other.fitting = {}
        if sizes is not None:
            other.of_program = other.of_plan = other.of_run = sizes
        return other

    def take(self, lowered: Lowered) -> None:
        """Take the program of the trace."""
        self.program, self._growth = lowered.program, BufferGrowth(lowered.symbolic_bytes)

    def keep(self, lowered: Lowered, plan: Plan) -> None:
        """Keep the sizes of each call if those of all tensors that ``plan`` moves are known then."""
        moved = {swap.buffer for swap in plan.swaps}.union(
            *((*lowered.program.ops[each.op].reads, *lowered.program.ops[each.op].writes) for each in plan.recomputes)
        )
        nodes = ((node, buffer) for graph in lowered.graphs for node, buffer in graph.buffer_of.items())
        self.are_kept = all(is_sized(node, self.of_program) for node, buffer in nodes if buffer in moved)

    def plan_for_own(self) -> None:
        """Note that a plan is made for the sizes of the program."""
        self.of_plan = self.of_program
        self.fitting.clear()

    def to_plan_for(self, sizes: Sizes, *, is_first: bool) -> Iterator[Sizes]:
        """Yield sizes whose plans would serve ``sizes``, too, the best first; at last these themselves.

        They are those of its bucket, and if it ``is_first`` the declared ones: others run by their plan at once.
        """
        assert self.symbolic is not None
        largest = self.symbolic.largest(sizes)
        if largest != sizes and is_first and self.symbolic.serves(largest):
            yield largest
        edges = {symbol: bucket_edge(size) for symbol, size in sizes.items()}
        more = min((edge - sizes[symbol] for symbol, edge in edges.items()), default=0)
        # Sizes may have to be odd, or the sum of others.
        each = (
            {symbol: max(sizes[symbol], edge - less) for symbol, edge in edges.items()} for less in range(_MAX_LESS)
        )
        # Or to differ by as much as here: the rows of tokens[:, :-1] are one apart.
        together = (
            {symbol: size + more - less for symbol, size in sizes.items()} for less in range(min(more, _MAX_LESS))
        )
        served = (those for those in (*each, *together) if those != sizes and self.symbolic.serves(those))
        yield from islice(served, 1)
        yield sizes

    def fit(self, sizes: Sizes) -> bool:
        """Whether the plan is known to serve a call of ``sizes``."""
        return sizes == self.of_plan or frozenset(sizes.items()) in self.fitting

    def make_fit(self, sizes: Sizes, step: PlannedStep, first: int, costs: OpCosts) -> PlannedStep:
        """Let the plan of ``step`` serve ``sizes``, too; return the step as it is for the largest that it serves.

        Args:
            sizes: of a call.
            step: whose plan the graph follows.
            first: the number in it of the graph's first buffer.
            costs: of the graph's program.

        Raises:
            SizesOutgrown: the plan has no room for them, or one of their own pays.
        """
        if not self.are_kept or (step.moves and not self._have_tier_room(sizes, step, first)):
            raise SizesOutgrown
        is_within, lost_seconds = self._growth.is_within(sizes, self.of_plan), 0.0
        is_far = step.moves and not self._are_near(sizes, costs)
        if is_far and self.borrowed.have_cost_a_plan(sizes):
            raise SizesOutgrown
        if is_far or not is_within:
            sized = self.step_for(step, first, sizes)
            if not is_within and sized.excess_bytes > 0:
                raise SizesOutgrown
            if is_far:
                lost_seconds = sized.plan.predicted_seconds - sized.costs.free_seconds
            if not (is_within or step.moves) and sized.tensor_peak_bytes > step.tensor_peak_bytes:
                step, self.of_plan = sized, sizes
        if len(self.fitting) >= _MAX_FITTING:
            self.fitting.clear()
        self.fitting[frozenset(sizes.items())] = lost_seconds
        return step

    def begin_run(self, sizes: Sizes) -> None:
        """Note that a call of ``sizes`` runs in the current step."""
        self.of_run = sizes
        if lost_seconds := self.fitting.get(frozenset(sizes.items()), 0.0):
            self.borrowed.note_run(sizes, lost_seconds)
            if self.borrowed.have_cost_a_plan(sizes):
                self.fitting.clear()

    def _have_tier_room(self, sizes: Sizes, step: PlannedStep, first: int) -> bool:
        """Whether what the plan of ``step`` swaps takes no more of its tier for ``sizes``."""
        runs = schedule(step.merged.program, step.plan.recomputes)
        swapped = {runs.buffers[swap.buffer] - first for swap in step.plan.swaps}
        return self._growth.is_within(sizes, self.of_plan, swapped)

    def _are_near(self, sizes: Sizes, costs: OpCosts) -> bool:
        """Whether a plan that moves tensors is not made for much larger ``sizes``: it would move more than needed."""
        if all(bucket_edge(size) == bucket_edge(self.of_plan[symbol]) for symbol, size in sizes.items()):
            return True
        return self.unmoved_bytes(self.of_plan, costs) <= _NEAR * self.unmoved_bytes(sizes, costs)

    def unmoved_bytes(self, sizes: Sizes, costs: OpCosts) -> int:
        """Return the peak of the graph's own tensors, for ``sizes``, if none is moved."""
        return StepMemory(self.program_for(self.program, 0, sizes), costs).peak.nbytes

    def step_for(self, step: PlannedStep, first: int, sizes: Sizes) -> PlannedStep:
        """Return ``step``, in which buffers of this graph begin at ``first``, for other ``sizes`` of it.

        Time and scratch of an op are assumed to grow as its buffers do.
        """
        sized = self.program_for(step.merged.program, first, sizes)
        costs = _scaled(step.costs, step.merged.program, sized)
        predicted = simulate(sized, step.allowance.room.with_streams(sized, costs), step.machine, step.plan)
        plan = replace(step.plan, predicted_peak_bytes=predicted.peak_bytes, predicted_seconds=predicted.seconds)
        return replace(step, merged=replace(step.merged, program=sized), costs=costs, plan=plan)

    def program_for(self, program: Program, first: int, sizes: Sizes) -> Program:
        """Return ``program``, in which buffers of this graph begin at ``first``, for other ``sizes`` of it."""
        buffers = list(program.buffers)
        for own, factor in self._growth.factors(sizes, self.of_program):
            nbytes = math.ceil(factor * self.program.buffers[own].nbytes)
            buffers[first + own] = replace(buffers[first + own], nbytes=nbytes)
        return replace(program, buffers=tuple(buffers))


def seconds_of_similar(step: PlannedStep, program: Program) -> Sequence[float]:
    """Return the seconds of the ops of ``program``, a trace of ``step`` for other sizes, as its runs have shown.

    It is empty if they have not, or if their sizes are much smaller or larger.
    """
    if step.history.phase < Phase.CALIBRATED or not _are_same_ops(step.merged.program, program):
        return ()
    costs = _scaled(step.costs, step.merged.program, program)
    peaks = StepMemory(step.merged.program, step.costs).peak.nbytes, StepMemory(program, costs).peak.nbytes
    return costs.seconds if max(peaks) <= _SIMILAR * min(peaks) else ()


def _are_same_ops(program: Program, sized: Program) -> bool:
    """Whether two programs of one trace differ in the bytes of their buffers alone."""
    ops = [[(op.target, op.reads, op.writes) for op in each.ops] for each in (program, sized)]
    return ops[0] == ops[1] and len(program.buffers) == len(sized.buffers)


def _scaled(costs: OpCosts, program: Program, sized: Program) -> OpCosts:
    """Return ``costs``, of ``program``, for the buffers of ``sized``: time and scratch of an op grow as they do."""

    def nbytes(op: Op, of: Program) -> int:
        if op.target == LOSS:
            return tangent_bytes(of, op)
        return sum(of.buffers[buffer].nbytes for buffer in {*op.reads, *op.writes})

    def share(op: Op) -> float:
        before = nbytes(op, program)
        return nbytes(op, sized) / before if before else 1.0

    shares = [share(op) for op in program.ops]
    scratch = {i: math.ceil(share * costs.scratch_bytes[i]) for i, share in enumerate(shares) if share != 1}
    seconds = tuple(share * each for share, each in zip(shares, costs.seconds, strict=True))
    return replace(costs.with_scratch(scratch), seconds=seconds)
