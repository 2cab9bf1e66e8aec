"""How much of a budget is lost to gaps between places? Tried: what a plan leaves between them is known afterwards."""

from __future__ import annotations

from collections.abc import Callable

from lmswap.errors import PlanInfeasible
from lmswap.ir.plan import Plan

# The search ends when no more than this share of what there is could be gained.
_CLOSE_ENOUGH = 1 / 32


def plan_between_gaps(plan_within: Callable[[int], Plan], placed_bytes: Callable[[Plan], int], most_bytes: int) -> Plan:
    """The fastest plan found whose tensors, with the gaps between their places, take ``most_bytes``.

    ``plan_within`` plans for so many bytes without gaps, ``placed_bytes`` says what a plan takes with them.

    Raises:
        PlanInfeasible: none was found; the bytes that it says are needed are those with gaps.
    """
    lost_bytes = too_few_bytes = 0  # that plans were kept from using
    enough_bytes: int | None = None
    found: list[Plan] = []
    refusal: PlanInfeasible | None = None
    while enough_bytes is None or enough_bytes - too_few_bytes > _CLOSE_ENOUGH * most_bytes:
        try:
            plan = plan_within(most_bytes - lost_bytes)
        except PlanInfeasible as error:
            refusal, enough_bytes = error, lost_bytes
        else:
            excess_bytes = placed_bytes(plan) - most_bytes
            if excess_bytes <= 0:
                found.append(plan)
                enough_bytes = lost_bytes
            else:
                too_few_bytes = lost_bytes
        if enough_bytes is None:  # more and more: a little less to plan with can leave the places as they are
            lost_bytes += max(excess_bytes, lost_bytes // 2)
        elif enough_bytes == 0:
            break
        else:
            lost_bytes = (too_few_bytes + enough_bytes) // 2
    if found:
        return min(found, key=lambda plan: plan.predicted_seconds)
    assert refusal is not None
    raise PlanInfeasible(
        budget_bytes=most_bytes,
        needed_bytes=refusal.needed_bytes + enough_bytes,
        where=refusal.where,
        live=refusal.live,
        policy=refusal.policy,
    )
