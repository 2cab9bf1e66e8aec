"""Policies without a search: "none" keeps every buffer, "swap_all" swaps all that the backward pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmswap.analyze.liveness import Gap
from lmswap.ir.plan import Plan, Swap
from lmswap.planner.between_steps import fetch_weights
from lmswap.planner.build_plan import build_plan
from lmswap.planner.problem import Problem
from lmswap.planner.schedule_copies import schedule_copies


def plan_none(problem: Problem) -> Plan:
    """Keeps every buffer.

    Raises:
        PlanInfeasible: the step's peak is over the budget.
    """
    if not problem.fits(()):
        raise problem.infeasible("none", ())
    return build_plan(problem, "none", ())


def plan_swap_all(problem: Problem) -> Plan:
    """Swaps every buffer that the backward pass reads; gaps within a pass only as far as the budget requires.

    Weights are non-resident in each of their gaps.

    Raises:
        PlanInfeasible: swapping in every gap does not fit the budget.
    """
    fetches = fetch_weights(problem)
    # The most that weights are resident at once, instead of all of them.
    without = replace(problem, budget_bytes=problem.budget_bytes + _non_resident_bytes(problem, fetches))
    crossing = [gap for gap in problem.gaps if problem.is_forward_to_backward(gap)]
    gaps = add_needed_gaps(without, crossing, policy="swap_all")
    swaps = [*schedule_copies(without, gaps, never_cancel=True), *fetches]
    swaps.sort(key=lambda swap: swap.first_use % max(1, len(problem.memory.program.ops)))
    return build_plan(problem, "swap_all", swaps)


def _non_resident_bytes(problem: Problem, fetches: Sequence[Swap]) -> int:
    """The least bytes of weights that are non-resident at any op."""
    num_ops = len(problem.memory.program.ops)
    change = np.zeros(num_ops + 1, np.int64)
    for swap in fetches:
        for start, stop in swap.absences(num_ops):
            change[start] += problem.nbytes(swap.buffer)
            change[stop] -= problem.nbytes(swap.buffer)
    return int(np.cumsum(change[:-1]).min()) if fetches else 0


def add_needed_gaps(problem: Problem, chosen: Sequence[Gap], *, policy: str) -> tuple[Gap, ...]:
    """``chosen`` plus further gaps until the budget is met: at the worst op, the one whose copies are best hidden.

    Raises:
        PlanInfeasible: all gaps of the problem are not enough.
    """
    taken = set(chosen)
    left = [gap for gap in problem.gaps if gap not in taken]
    after = np.array([gap.after for gap in left], np.int64)
    before = np.array([gap.before for gap in left], np.int64)
    hidden = np.array([problem.idle_seconds(gap) - problem.copy_seconds(gap) for gap in left])
    curve = problem.curve_without(chosen)
    added: list[Gap] = []
    while len(curve) and curve.max() > problem.budget_bytes:
        worst = int(curve.argmax())
        (covering,) = np.nonzero((after < worst) & (worst < before))
        if not len(covering):
            raise problem.infeasible(policy, problem.gaps)
        best = int(covering[hidden[covering].argmax()])
        gap = left[best]
        added.append(gap)
        curve[gap.after + 1 : gap.before] -= problem.nbytes(gap.buffer)
        after[best] = before[best] = -1  # covers no op from now on
    return (*chosen, *added)
