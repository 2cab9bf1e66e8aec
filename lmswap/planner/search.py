"""Bounded search over the actions of all buffers: problem → the best plan found.

The search itself is csrc/planner. It chooses an action for every gap of every buffer, schedules the whole step, and
improves by flips of classes of equal layers and by annealing; steps of a few ops it solves exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from threading import Lock

from lmswap.errors import PlanInfeasible
from lmswap.hardware.host_memory import release_thread_memory
from lmswap.ir.certificate import Certificate
from lmswap.ir.machine import Host, Rate
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.ir.program import Buffer, BufferKind, Program, Segment
from lmswap.planner import _core
from lmswap.planner.build_plan import build_plan
from lmswap.planner.problem import Problem

_LIFETIME = {
    BufferKind.ACTIVATION: 0,
    BufferKind.OUTPUT: 1,
    BufferKind.GRADIENT: 1,
    BufferKind.TANGENT: 2,
    BufferKind.ACCUMULATED_GRADIENT: 3,
    BufferKind.SUMMED_GRADIENT: 4,
    BufferKind.WEIGHT: 5,
    BufferKind.OPTIMIZER_STATE: 5,
}
_FETCHED = 6

# The smallest buffers, of this share of the budget together, are planned as always resident: an evaluation then has a
# third less work (U-Net 37 %, ResNet-50 43 % of all reads and writes).
_SMALL = 1e-4

# Of 300 random training steps of 8 ops half need less than 30 states, and 5 more than these, which take some 0.2 s.
_MAX_EXACT_STATES = 50_000
# They take 50 MiB, which the C library would keep: one search at a time, whose memory, if it is much, is given back.
_one_at_a_time, _FEW_STATES = Lock(), 1_000

# A search ends in one of several local optima, of memory too: on the U-Net at 96³ the least budgets of two seeds are
# 10 % apart.
_SEEDS_BEFORE_REFUSAL = 4


# 7 B parameters in fp32 with AdamW (H100, 24 GiB, 32,768 tokens): 1.257 times the unlimited step instead of 1.28.
_MORE_WHERE_PREDICTED = 3

# Larger steps have more buffers that can move than an exhaustive search has states for.
_MAX_EXACT_OPS = 1_000


@dataclass(frozen=True)
class Found:
    """What a search has found for ``problem``, of a step without the buffers ``left_out``; `plan` completes it."""

    problem: Problem
    policy: str
    result: _core.SearchResult
    left_out: frozenset[int] = frozenset()

    @cached_property
    def predicted_seconds(self) -> float:
        """Those of its plan."""
        problem = self.problem
        return _core.predict(_step_of(problem, self.left_out), _make_link(problem, 1.0), self.result)

    def plan(self) -> Plan:
        """The plan.

        Raises:
            TierError: its host copies exceed the tier.
        """
        program, tier = self.problem.memory.program, self.problem.tier.name
        made = [buffer for op, _ in self.result.recomputes for buffer in program.ops[op].writes]
        recomputed = [len(program.buffers) + number for number, b in enumerate(made) if b not in self.left_out]
        buffers = [*range(len(program.buffers)), *recomputed]  # by version of a buffer: its id in the schedule
        swaps = [
            Swap(
                buffers[s.version],
                tier,
                0,
                None if s.out_start < 0 else s.out_start,
                s.release,
                s.in_start,
                s.first_use,
            )
            for s in self.result.swaps
        ]
        recomputes = [Recompute(op, position) for op, position in self.result.recomputes]
        return build_plan(self.problem, self.policy, swaps, recomputes)


def as_plan(found: Plan | Found) -> Plan:
    """``found`` as a plan; see `Found.plan`."""
    return found.plan() if isinstance(found, Found) else found


def plan_swap(problem: Problem) -> Plan:
    """The best plan found without recomputes.

    Raises:
        PlanInfeasible: none was found that fits the budget.
    """
    return build_plan(problem, "swap", ()) if problem.fits(()) else as_plan(find_swap(problem))


def find_swap(problem: Problem) -> Plan | Found:
    """As `plan_swap`."""
    return plan_exactly(problem, policy="swap", may_recompute=False) or find(
        problem, policy="swap", may_recompute=False
    )


def plan_recompute(problem: Problem) -> Plan:
    """The best plan found without swaps.

    Raises:
        PlanInfeasible: none was found that fits the budget; carries the smallest budget found that fits.
    """
    return build_plan(problem, "recompute", ()) if problem.fits(()) else as_plan(find_recompute(problem))


def find_recompute(problem: Problem) -> Plan | Found:
    """As `plan_recompute`.

    What fits does not depend on the machine: before it refuses, it searches with costs that do not either.

    Raises:
        PlanInfeasible: none was found that fits the budget; carries the smallest budget found that fits.
    """
    exact = plan_exactly(problem, policy="recompute", may_swap=False)
    if exact is not None:
        return exact
    search = partial(find, policy="recompute", may_swap=False)
    try:
        return search(problem)
    except PlanInfeasible as error:
        refusals = [error]
    memory = problem.memory
    anywhere = replace(memory, costs=replace(memory.costs, seconds=_work(memory.program)))
    for seed in range(1, 1 + _SEEDS_BEFORE_REFUSAL) if problem.find_min_budget else ():
        try:
            found = search(replace(problem, memory=anywhere, target_seconds=0.0), seed=seed)
        except PlanInfeasible as error:
            refusals.append(error)
        else:
            return replace(found, problem=problem)
    raise min(refusals, key=lambda refusal: refusal.needed_bytes)


def _work(program: Program) -> tuple[float, ...]:
    """By op: flops and bytes, weighed as by no machine in particular."""
    sizes = [buffer.nbytes for buffer in program.buffers]
    return tuple(
        1e-12 * op.flops + 1e-9 * sum(sizes[buffer] for buffer in (*op.reads, *op.writes)) for op in program.ops
    )


def plan_exactly(problem: Problem, *, policy: str, may_swap: bool = True, may_recompute: bool = True) -> Plan | None:
    """The optimal plan, by exhaustive search; None if the step is too large for that, or nothing fits."""
    if problem.memory.program.is_cyclic or len(problem.memory.program.ops) > _MAX_EXACT_OPS:
        return None
    limits = _limits(problem, may_swap=may_swap, may_recompute=may_recompute)
    step, link = _step_of(problem, frozenset()), _make_link(problem, 1.0)
    with _one_at_a_time:
        found = _core.find_exactly(step, link, limits, max_states=_MAX_EXACT_STATES)
        if found is None or found.evaluations > _FEW_STATES:
            release_thread_memory()
    if not found or not found.fits:
        return None
    return replace(Found(problem, policy, found).plan(), is_optimal=may_swap and may_recompute)


def find(
    problem: Problem,
    *,
    policy: str,
    may_swap: bool = True,
    may_recompute: bool = True,
    seed: int = 1,
) -> Found:
    """The best plan that the search with ``seed`` finds.

    Raises:
        PlanInfeasible: no plan was found that fits the budget; carries the smallest budget that fits, or, without
            ``problem.find_min_budget``, the next one to try.
    """
    link = _make_link(problem, problem.link_share)
    small = frozenset[int]() if problem.is_proven_infeasible else _small_buffers(problem, problem.budget_bytes)
    step, small_bytes = _step_of(problem, small), _counted_bytes(problem, small)
    evaluations = _max_evaluations(problem) // (1 if may_swap and may_recompute else 3)
    prices = _prices(problem)

    def search(budget_bytes: int, target_seconds: float) -> _core.SearchResult:
        limits = _limits(
            problem, may_swap=may_swap, may_recompute=may_recompute, budget_bytes=budget_bytes - small_bytes
        )
        return _core.search(
            step,
            link,
            limits,
            max_evaluations=evaluations,
            target_seconds=target_seconds,
            tolerated_excess_bytes=max(0, problem.close_to_least_bytes - budget_bytes),
            prices=prices,
            seed=seed,
        )

    if problem.is_proven_infeasible:  # a search would run to its end: start at the proved lower bound
        needed_bytes, worst_op = problem.min_budget
    else:
        found = search(problem.budget_bytes, problem.target_seconds)
        if not found.fits and found.excess_bytes <= small_bytes:
            small, step, small_bytes = frozenset(), _step_of(problem, frozenset()), 0
            found = search(problem.budget_bytes, problem.target_seconds)
        if found.fits:
            return Found(problem, policy, found, small)
        needed_bytes, worst_op = problem.budget_bytes + found.excess_bytes, found.worst_op
    # Any plan shows that a budget suffices.
    while problem.find_min_budget and not (found := search(needed_bytes, inf)).fits:
        needed_bytes, worst_op = needed_bytes + found.excess_bytes, found.worst_op
    # What a search within that budget leaves out counts for more than it takes.
    needed_bytes += _counted_bytes(problem, _small_buffers(problem, needed_bytes)) - small_bytes
    raise _infeasible(problem, policy, needed_bytes, worst_op)


def _prices(problem: Problem) -> _core.Prices:
    """The bound's prices; none where weights are fetched, whose copies the bound does not confine to their segments."""
    bound = problem.bound if problem.bound and not problem.fetches_weights else Certificate(0.0)
    return _core.Prices(cuts=bound.cuts, memory=bound.memory_prices, out=bound.out_prices, into=bound.in_prices)


def _small_buffers(problem: Problem, budget_bytes: int) -> frozenset[int]:
    """The smallest buffers of the step, as many as hold `_SMALL` of ``budget_bytes`` together."""
    own = [buffer for buffer in problem.memory.program.buffers if not buffer.is_resident]
    own.sort(key=lambda buffer: (buffer.nbytes, buffer.id))
    held = accumulate(buffer.nbytes for buffer in own)
    return frozenset(b.id for b, total in zip(own, held, strict=True) if total <= _SMALL * budget_bytes)


def _counted_bytes(problem: Problem, small: frozenset[int]) -> int:
    """What a search counts for buffers left out: one that lives to the end of the step may exist twice."""
    return 2 * sum(map(problem.nbytes, small))


def _max_evaluations(problem: Problem) -> int:
    """How many schedules a search tries: one takes 15 to 35 ns an op, and the target is 1,000 ops in a second.

    No training waits for the plans of whole steps that are only predicted.
    """
    program = problem.memory.program
    share = _MORE_WHERE_PREDICTED if program.is_cyclic and not problem.fetches_weights else 1
    return int(min(24_000, share * 4.8e5 / max(len(program.ops), 1) ** 0.5))


def _limits(problem: Problem, *, may_swap: bool, may_recompute: bool, budget_bytes: int | None = None) -> _core.Limits:
    return _core.Limits(
        budget_bytes=problem.budget_bytes if budget_bytes is None else budget_bytes,
        tier_bytes=problem.tier.held_bytes,
        min_swap_bytes=problem.min_swap_bytes,
        may_swap=may_swap,
        may_recompute=may_recompute,
        prefetches_ahead=problem.prefetches_ahead,
    )


def _infeasible(problem: Problem, policy: str, needed_bytes: int, worst_op: int) -> PlanInfeasible:
    op = problem.memory.program.ops[worst_op]
    return PlanInfeasible(
        budget_bytes=problem.budget_bytes,
        needed_bytes=min(needed_bytes, problem.memory.peak.nbytes),  # small buffers count twice in a search
        where=f"op {worst_op} {op.title}",
        live=problem.memory.largest(problem.memory.fixed_at(worst_op), worst_op),
        policy=policy,
    )


def _step_of(problem: Problem, left_out: frozenset[int]) -> _core.Step:
    """What searches are given of the step; made once."""
    with problem.known.making_step:
        for memory, known, step in problem.known.steps:
            if memory is problem.memory and known == left_out:
                return step
        step = _make_step(problem, left_out)
        problem.known.steps.append((problem.memory, left_out, step))
        return step


def _make_step(problem: Problem, left_out: frozenset[int] = frozenset()) -> _core.Step:
    program, costs = problem.memory.program, problem.memory.costs
    never_listed = left_out | {buffer.id for buffer in program.buffers if buffer.is_resident}

    def listed(buffers: tuple[int, ...]) -> list[int]:
        return [buffer for buffer in dict.fromkeys(buffers) if buffer not in never_listed]

    return _core.Step(
        seconds=costs.seconds,
        scratch_bytes=costs.scratch_bytes,
        repeatable=[
            # A recomputation would make a new buffer in place of one that the step is given.
            is_repeatable and not any(program.buffers[b].is_resident or program.buffers[b].is_shared for b in op.writes)
            for op, is_repeatable in zip(program.ops, problem.memory.repeatable, strict=True)
        ],
        reads=[listed(op.reads) for op in program.ops],
        writes=[listed(op.writes) for op in program.ops],
        nbytes=[0 if buffer.is_resident else buffer.nbytes for buffer in program.buffers],
        lifetime=[_lifetime(problem, buffer) for buffer in program.buffers],
        segments=[(s.start, s.stop, _forward_of(program, s)) for s in program.segments],
    )


def _lifetime(problem: Problem, buffer: Buffer) -> int:
    is_fetched = problem.fetches_weights and buffer.kind is BufferKind.WEIGHT
    return _FETCHED if is_fetched else _LIFETIME.get(buffer.kind, 1)


def _make_link(problem: Problem, share: float) -> _core.Link:
    def points(rate: Rate) -> list[tuple[int, float]]:
        return [(nbytes, seconds / share) for nbytes, seconds in rate.points]

    link, host = problem.link, problem.machine.host or Host(0.0, 0.0)
    return _core.Link(
        out=points(link.out_rate),
        into=points(link.in_rate),
        both_factor=link.both_factor,
        compute_factor=link.compute_factor,
        host_op_seconds=host.op_seconds,
        host_copy_seconds=host.copy_seconds,
    )


def _forward_of(program: Program, segment: Segment) -> int:
    """The index of the segment that passes its values to ``segment``, or -1."""
    found = [n for n, s in enumerate(program.segments) if s != segment and s.can_pass_values_to(segment)]
    return found[0] if found else -1
