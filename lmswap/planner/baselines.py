"""Policies without a search: "none" keeps every buffer, "swap_all" swaps all that the backward pass reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmswap.analyze.liveness import Gap
from lmswap.ir.plan import Plan
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

    Raises:
        PlanInfeasible: swapping in every gap does not fit the budget.
    """
    crossing = [gap for gap in problem.gaps if problem.is_forward_to_backward(gap)]
    gaps = add_needed_gaps(problem, crossing, policy="swap_all")
    return build_plan(problem, "swap_all", schedule_copies(problem, gaps, never_cancel=True))


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
