"""Which plan is best here? Problem → the plan with the least predicted seconds that any policy of lmswap finds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from lmswap.errors import OptionError, PlanInfeasible, TierError
from lmswap.ir.plan import Plan
from lmswap.plan.baselines import plan_none, plan_swap_all
from lmswap.plan.checkpoint import plan_checkpoint
from lmswap.plan.memory_budget import plan_memory_budget
from lmswap.plan.problem import Problem
from lmswap.plan.search import plan_exactly, plan_recompute, plan_search, plan_swap
from lmswap.plan.tflms import plan_tflms

# The other policies seldom find what the searches do not; on larger steps they would take longer than those.
_MOST_OPS_FOR_BASELINES = 3_000

# Plans are the same on machines with more cores.
_NUM_THREADS = 2

# It tries 21 schedules, 0.1 to 0.6 s from 500 ops on. On U-Nets, ResNet-50, ViT and GPT at 90, 70 and 50 % of the peak
# (V100, H200) it found nothing that fits, or steps 0.1 to 17 % slower than the searches did.
_MOST_OPS_FOR_MEMORY_BUDGET = 200

# A search ends in one of several valleys: at 521 ops one seed of three is a point of step time better than the others.
# Each takes 0.3 s; the third brought the U-Net (bf16, H200, 42 % of the peak) from 2.2 to 1.5 % over the bound.
_MOST_OPS_FOR_THREE_SEEDS = 600


def plan_auto(problem: Problem, *, effort: int = 1) -> Plan:
    """The fastest plan found: keeping, swapping and computing again, chosen buffer by buffer.

    ``effort`` times the usual search takes as many times as long. At 4 the U-Net at 192³ (bf16, H200, 40 % of the peak)
    ends 0.7 instead of 0.8 % over the bound.

    Raises:
        OptionError: ``effort`` is not a positive number.
        PlanInfeasible: none was found that fits; carries the smallest budget that fits.
        TierError: some would fit the budget, but not the tier.
    """
    if effort < 1:
        raise OptionError(f"effort must be at least 1, the usual search, not {effort}")
    if problem.fits(()):
        return replace(plan_none(problem), policy="auto")
    exact = plan_exactly(problem, policy="auto")
    if exact is not None:
        return exact

    def attempt(policy: Callable[[Problem], Plan]) -> Plan | PlanInfeasible | TierError:
        try:
            return policy(problem)
        except (PlanInfeasible, TierError) as error:
            return error

    with ThreadPoolExecutor(_NUM_THREADS) as threads:  # the searches run outside of Python's lock
        policies = _policies(problem, effort)
        outcomes = list(threads.map(attempt, policies[:_NUM_THREADS]))
        if not any(isinstance(each, Plan) and each.predicted_seconds <= problem.target_seconds for each in outcomes):
            outcomes += threads.map(attempt, policies[_NUM_THREADS:])
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    if not plans:
        raise min(
            (outcome for outcome in outcomes if not isinstance(outcome, Plan)),
            key=lambda refusal: getattr(refusal, "needed_bytes", 0),
        )
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    return replace(best, policy="auto" if best.policy == "search" else f"auto ({best.policy})")


def _policies(problem: Problem, effort: int) -> list[Callable[[Problem], Plan]]:
    num_ops = len(problem.memory.program.ops)
    seeds = range(1, 4 if num_ops <= _MOST_OPS_FOR_THREE_SEEDS else 3)
    search = partial(plan_search, policy="search", effort=effort)
    policies: list[Callable[[Problem], Plan]] = [partial(search, seed=seed) for seed in seeds]
    policies += [plan_swap, plan_recompute]
    if num_ops <= _MOST_OPS_FOR_BASELINES:
        policies += [plan_swap_all, plan_tflms, plan_checkpoint]
    if num_ops <= _MOST_OPS_FOR_MEMORY_BUDGET:
        policies.append(plan_memory_budget)
    return policies
