"""Published methods that only recompute, as plans of stored programs with which those of lmswap are compared."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.baselines.checkpoint import plan_checkpoint
from benchmarks.baselines.memory_budget import plan_memory_budget
from lmswap.analyze.memory import StepMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.planner import check
from lmswap.planner.bound.certify import certify
from lmswap.planner.problem import Problem

_BASELINES = {"checkpoint": plan_checkpoint, "memory_budget": plan_memory_budget}
BASELINES = tuple(_BASELINES)


def plan_baseline(
    name: str,
    program: Program,
    costs: OpCosts,
    machine: Machine,
    *,
    budget_bytes: int,
    tier: str,
    min_swap_bytes: int,
) -> Plan:
    """Plan one step by the method ``name`` of `BASELINES`, as `lmswap.planner.make_plan` does by a policy.

    Returns:
        The plan with its certificate, both verified, without reasons.

    Raises:
        PlanInfeasible: the method cannot meet the budget; carries the smallest one that it can meet.
        PlanInvalid: a bug in the method.
    """
    problem = Problem(
        StepMemory(program, costs),
        machine,
        machine.tier(tier),
        budget_bytes=budget_bytes,
        min_swap_bytes=min_swap_bytes,
    )
    plan = _BASELINES[name](problem)
    bound = certify(problem.memory, machine, tier=tier, budget_bytes=budget_bytes, min_swap_bytes=min_swap_bytes)
    # The same seconds, summed in another order, may differ by rounding.
    plan = replace(plan, certificate=replace(bound, seconds=min(bound.seconds, plan.predicted_seconds)))
    check(plan, program, costs, machine, tier=tier, min_swap_bytes=min_swap_bytes)
    return plan
