"""Planning: program + costs + machine + budget → a verified `Plan`.

`make_plan` is the entry point; `reprice` updates a plan's prediction to other costs; `simulate` predicts a plan's
timeline; `verify` checks a plan by independent code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from lmswap.analyze.memory import StepMemory
from lmswap.collection_pause import collection_paused
from lmswap.errors import OptionError
from lmswap.ir.certificate import Certificate
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.planner.baselines import plan_none, plan_swap_all
from lmswap.planner.between_steps import without_weights_between_steps
from lmswap.planner.bound.certify import budget_lower_bound, certify
from lmswap.planner.bound.verify_certificate import verify_certificate
from lmswap.planner.explain import explain_plan
from lmswap.planner.portfolio import plan_auto
from lmswap.planner.problem import PLANNED_LINK_SHARE, Problem
from lmswap.planner.search import plan_recompute, plan_swap
from lmswap.planner.simulate import simulate
from lmswap.planner.tflms import plan_tflms
from lmswap.planner.verify import verify

_POLICIES: dict[str, Callable[..., Plan]] = {
    "auto": plan_auto,
    "none": plan_none,
    "swap": plan_swap,
    "recompute": plan_recompute,
    "swap_all": plan_swap_all,
    "tflms": plan_tflms,
}
POLICIES: tuple[str, ...] = tuple(_POLICIES)

# Policies of earlier versions: "auto" took their plans for none of the stored programs. benchmarks/baselines has them.
_REMOVED = ("checkpoint", "memory_budget")

# Policies that move nothing where the whole step fits.
KEEP_WHAT_FITS = ("auto", "none", "swap", "recompute")

# A search ends at a plan that is within this of the bound: more planning would cost more than it gains.
_CLOSE_ENOUGH = 2e-4

__all__ = [
    "KEEP_WHAT_FITS",
    "POLICIES",
    "check",
    "check_policy",
    "import_search",
    "is_search_imported",
    "make_plan",
    "reprice",
    "simulate",
    "verify",
]


def import_search() -> None:
    """Imports what only steps that do not fit as they are need: scipy, which takes 0.4 s and 36 MiB."""
    from lmswap.planner.bound import price_lp  # noqa: F401


def is_search_imported() -> bool:
    """Whether what `import_search` imports is there."""
    return "lmswap.planner.bound.price_lp" in sys.modules


def check_policy(policy: object) -> None:
    """Raise OptionError unless ``policy`` is one of `POLICIES`."""
    if policy in _REMOVED:
        raise OptionError(
            f"policy {policy!r} has been removed; use 'auto', or 'recompute', which recomputes without swapping"
        )
    if policy not in POLICIES:
        raise OptionError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")


@collection_paused()
def make_plan(
    policy: str,
    program: Program,
    costs: OpCosts,
    machine: Machine,
    *,
    budget_bytes: int,
    tier: str,
    min_swap_bytes: int,
    link_share: float = PLANNED_LINK_SHARE,
    certificate: Certificate | None = None,
    fetches_weights: bool = False,
    **parameters: int,
) -> Plan:
    """Plans one step of ``program`` and bounds the optimum; both are verified.

    Args:
        policy: one of `POLICIES`.
        program: the step.
        costs: seconds and scratch bytes of its ops.
        machine: the machine that runs it.
        budget_bytes: bytes that the step may occupy at any time, as counted by `lmswap.analyze.memory`.
        tier: name of the tier of swapped buffers.
        min_swap_bytes: smaller buffers are not swapped.
        link_share: copies are planned for a link of this share of its rate; the prediction is for the whole.
        certificate: that of the same step and budget, if known; else it is computed.
        fetches_weights: weights that move are non-resident between steps, see `lmswap.planner.between_steps`.
        parameters: those of the policy, by name; see `lmswap.planner.tflms.plan_tflms`.

    Returns:
        The plan, with its certificate and the reason for each buffer's action.

    Raises:
        OptionError: unknown policy, tier or parameter.
        PlanInfeasible: the policy cannot meet the budget; carries the smallest one that it can meet.
        TierError: the tier is too small.
        PlanInvalid: a bug in the policy.
    """
    check_policy(policy)
    if program.is_cyclic and policy not in KEEP_WHAT_FITS and not (policy == "swap_all" and program.only_reads_weights):
        raise OptionError(f"policy '{policy}' moves activations only; for weights use {', '.join(KEEP_WHAT_FITS)}")
    if len(costs.seconds) != len(program.ops) or len(costs.scratch_bytes) != len(program.ops):
        raise OptionError(f"costs are of {len(costs.seconds)} ops, the program has {len(program.ops)}")
    limits: dict[str, Any] = {"budget_bytes": budget_bytes, "min_swap_bytes": min_swap_bytes}
    memory, link = StepMemory(program, costs), machine.tier(tier).link.while_busy
    certificate = certificate or certify(memory, machine, tier=tier, **limits)
    problem = Problem(
        memory,
        machine,
        machine.tier(tier),
        **limits,
        link_share=link_share,
        fetches_weights=fetches_weights and program.only_reads_weights,
        target_seconds=certificate.seconds * (1 + _CLOSE_ENOUGH),
        bound=certificate,
        min_budget=(0, 0) if isfinite(certificate.seconds) else budget_lower_bound(memory, link, min_swap_bytes),
    )
    known = _POLICIES[policy].__kwdefaults__ or {}
    if unknown := sorted(set(parameters) - set(known)):
        raise OptionError(f"policy '{policy}' has no parameter {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    plan = _POLICIES[policy](problem, **parameters)
    if problem.fetches_weights and (rested := without_weights_between_steps(plan, program)) is not plan:
        predicted = problem.timeline(rested.swaps, rested.recomputes)
        plan = replace(rested, predicted_seconds=predicted.seconds, predicted_peak_bytes=predicted.peak_bytes)
    return _explained(problem, plan, certificate)


def reprice(
    plan: Plan,
    program: Program,
    costs: OpCosts,
    machine: Machine,
    *,
    tier: str,
    min_swap_bytes: int,
    certificate: Certificate | None = None,
) -> Plan:
    """The swaps and recomputes of ``plan`` with the prediction, certificate and reasons for other costs.

    The arguments are those of `make_plan`. If the predicted peak exceeds the budget, it becomes the budget: a step
    continues with its plan if no other takes less.

    Raises:
        PlanInvalid: ``plan`` is not one for ``program``.
    """
    memory = StepMemory(program, costs)
    problem = Problem(memory, machine, machine.tier(tier), plan.budget_bytes, min_swap_bytes)
    predicted = problem.timeline(plan.swaps, plan.recomputes)
    budget_bytes = max(plan.budget_bytes, predicted.peak_bytes)
    if budget_bytes > plan.budget_bytes:
        problem = replace(problem, budget_bytes=budget_bytes)
    limits: dict[str, Any] = {"budget_bytes": budget_bytes, "min_swap_bytes": min_swap_bytes}
    certificate = certificate or certify(memory, machine, tier=tier, **limits)
    priced = replace(
        plan,
        budget_bytes=budget_bytes,
        predicted_seconds=predicted.seconds,
        predicted_peak_bytes=predicted.peak_bytes,
        is_optimal=False,
    )
    return _explained(problem, priced, certificate)


def _explained(problem: Problem, plan: Plan, certificate: Certificate) -> Plan:
    """``plan`` with its certificate and reasons, verified."""
    # The same seconds, summed in another order, may differ by rounding.
    certificate = replace(certificate, seconds=min(certificate.seconds, plan.predicted_seconds))
    plan = replace(plan, certificate=certificate, reasons=explain_plan(problem, plan))
    memory, tier = problem.memory, problem.tier.name
    check(plan, memory.program, memory.costs, problem.machine, tier=tier, min_swap_bytes=problem.min_swap_bytes)
    return plan


def check(plan: Plan, program: Program, costs: OpCosts, machine: Machine, *, tier: str, min_swap_bytes: int) -> None:
    """Checks a plan of `make_plan` and its certificate against its arguments, by independent code.

    Raises:
        PlanInvalid: a rule is broken, or the certificate states more than it proves.
    """
    verify(program, costs, machine, plan)
    if plan.certificate is not None:
        limits: dict[str, Any] = {"budget_bytes": plan.budget_bytes, "tier": tier, "min_swap_bytes": min_swap_bytes}
        verify_certificate(program, costs, machine, plan.certificate, **limits)
