"""The ratio to plan with for the compressed tier, by what swapped tensors occupied there in the last step."""

from __future__ import annotations

from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.runtime.tiers import MAX_RATIO

TIER = "compressed"
# Plans fill compressed memory to this share: tensors that a U-Net swaps took 0.87 to 0.89 of the planned bytes.
_FULL_SHARE = 0.9


def with_measured_ratio(machine: Machine, plan: Plan, taken_bytes: int) -> Machine:
    """Return ``machine`` with the ratio by which the tensors of ``plan`` took ``taken_bytes`` of the tier."""
    ratio = _FULL_SHARE * plan.tier_bytes.get(TIER, 0) / max(taken_bytes, 1)
    return machine.with_ratio(TIER, min(max(1.0, ratio), MAX_RATIO))


def with_needed_ratio(machine: Machine, plan: Plan, taken_bytes: int) -> Machine:
    """Return ``machine`` with that ratio, or with the one that ``plan`` needs if it is larger."""
    measured = with_measured_ratio(machine, plan, taken_bytes).tier(TIER)
    return machine.with_ratio(TIER, max(measured.ratio, plan.tier_bytes.get(TIER, 0) / measured.capacity_bytes))
