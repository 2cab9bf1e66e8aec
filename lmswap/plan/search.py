"""Which buffers to keep, to swap and to compute again? Problem → the best plan that a bounded search finds.

The search itself is csrc/planner. It gives every gap of every buffer a fate, schedules and places the whole step, and
improves by flips of classes of equal layers and by annealing; steps of a few ops it solves exactly.
"""

from __future__ import annotations

from lmswap.analyze.repeatable import repeatable_ops
from lmswap.errors import PlanInfeasible
from lmswap.ir.machine import Rate
from lmswap.ir.plan import Plan, Rerun, Swap
from lmswap.ir.program import BufferKind, Program, Segment
from lmswap.plan import _core
from lmswap.plan.finish import finish
from lmswap.plan.problem import Problem

_LIFE = {
    BufferKind.ACTIVATION: 0,
    BufferKind.OUTPUT: 1,
    BufferKind.GRADIENT: 1,
    BufferKind.TANGENT: 2,
}

# Steps of 8 ops need some hundred to some ten thousand states, 0.1 s at most.
_MOST_EXACT_STATES = 50_000


def plan_swap(problem: Problem) -> Plan:
    """The best plan found that computes nothing twice.

    Raises:
        PlanInfeasible: none was found that fits the budget.
    """
    return plan_exactly(problem, policy="swap", may_redo=False) or plan_search(problem, policy="swap", may_redo=False)


def plan_recompute(problem: Problem) -> Plan:
    """The best plan found that moves nothing.

    Raises:
        PlanInfeasible: none was found that fits the budget.
    """
    exact = plan_exactly(problem, policy="recompute", may_swap=False)
    return exact or plan_search(problem, policy="recompute", may_swap=False)


def plan_exactly(problem: Problem, *, policy: str, may_swap: bool = True, may_redo: bool = True) -> Plan | None:
    """The best plan there is, by exhaustive search; None where the step is too large for that, or nothing fits."""
    limits = _limits(problem, may_swap=may_swap, may_redo=may_redo)
    found = _core.find_exactly(_make_step(problem), _make_link(problem, 1.0), limits, most_states=_MOST_EXACT_STATES)
    return _finish(problem, policy, found) if found and found.fits else None


def plan_search(
    problem: Problem,
    *,
    policy: str,
    may_swap: bool = True,
    may_redo: bool = True,
    seed: int = 1,
    effort: int = 1,
) -> Plan:
    """The best plan that the search with ``seed`` finds, in ``effort`` times its usual number of tries.

    Raises:
        PlanInfeasible: none was found that fits the budget; carries the smallest one that fits.
    """
    step, link = _make_step(problem), _make_link(problem, problem.link_share)
    evaluations = effort * _most_evaluations(len(problem.memory.program.ops)) // (1 if may_swap and may_redo else 3)

    def search(budget_bytes: int) -> _core.Found:
        limits = _limits(problem, may_swap=may_swap, may_redo=may_redo, budget_bytes=budget_bytes)
        target_seconds = problem.target_seconds
        return _core.search(step, link, limits, most_evaluations=evaluations, target_seconds=target_seconds, seed=seed)

    found = search(problem.budget_bytes)
    if found.fits:
        return _finish(problem, policy, found)
    needed_bytes = problem.budget_bytes
    while not found.fits:
        needed_bytes, worst_op = needed_bytes + found.excess_bytes, found.worst_op
        found = search(needed_bytes)
    raise _infeasible(problem, policy, needed_bytes, worst_op)


def _most_evaluations(num_ops: int) -> int:
    """How many schedules a search tries: one takes 50 to 100 ns an op, and 1,000 ops shall take a second."""
    return int(min(20_000, max(8e6 / num_ops, min(8_000, 1e8 / num_ops))))


def _limits(problem: Problem, *, may_swap: bool, may_redo: bool, budget_bytes: int | None = None) -> _core.Limits:
    return _core.Limits(
        budget_bytes=problem.budget_bytes if budget_bytes is None else budget_bytes,
        tier_bytes=problem.tier.capacity_bytes,
        min_swap_bytes=problem.min_swap_bytes,
        may_swap=may_swap,
        may_redo=may_redo,
    )


def _finish(problem: Problem, policy: str, found: _core.Found) -> Plan:
    tier = problem.tier.name
    swaps = [
        Swap(s.copy, tier, 0, None if s.out_start < 0 else s.out_start, s.release, s.in_start, s.first_use)
        for s in found.swaps
    ]
    return finish(problem, policy, swaps, [Rerun(op, position) for op, position in found.reruns])


def _infeasible(problem: Problem, policy: str, needed_bytes: int, worst_op: int) -> PlanInfeasible:
    op = problem.memory.program.ops[worst_op]
    return PlanInfeasible(
        budget_bytes=problem.budget_bytes,
        needed_bytes=needed_bytes,
        where=f"op {worst_op} '{op.name}'" + (f" ({op.source})" if op.source else ""),
        live=problem.memory.largest(problem.memory.fixed_at(worst_op), worst_op),
        policy=policy,
    )


def _make_step(problem: Problem) -> _core.Step:
    program, costs = problem.memory.program, problem.memory.costs
    return _core.Step(
        seconds=costs.seconds,
        scratch_bytes=costs.scratch_bytes,
        repeatable=repeatable_ops(program),
        reads=[_own(program, op.reads) for op in program.ops],
        writes=[_own(program, op.writes) for op in program.ops],
        nbytes=[0 if buffer.is_resident else buffer.nbytes for buffer in program.buffers],
        life=[_LIFE.get(buffer.kind, 1) for buffer in program.buffers],
        segments=[(s.start, s.stop, _forward_of(program, s)) for s in program.segments],
    )


def _make_link(problem: Problem, share: float) -> _core.Link:
    def points(rate: Rate) -> list[tuple[int, float]]:
        return [(nbytes, seconds / share) for nbytes, seconds in rate.points]

    link = problem.link
    return _core.Link(
        out=points(link.out_rate),
        into=points(link.in_rate),
        both_factor=link.both_factor,
        compute_factor=link.compute_factor,
    )


def _own(program: Program, buffers: tuple[int, ...]) -> list[int]:
    return [buffer for buffer in dict.fromkeys(buffers) if not program.buffers[buffer].is_resident]


def _forward_of(program: Program, segment: Segment) -> int:
    """The index of the segment that hands its values on to ``segment``, or -1."""
    found = [n for n, s in enumerate(program.segments) if s != segment and s.hands_on_to(segment)]
    return found[0] if found else -1
