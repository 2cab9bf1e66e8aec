"""What can no plan beat? Program + costs → seconds."""

from __future__ import annotations

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program


def lower_bound_seconds(
    program: Program, costs: OpCosts, machine: Machine, *, budget_bytes: int, tier: str, min_swap_bytes: int
) -> float:
    """Seconds of the ops alone: what a step takes when memory costs nothing."""
    return sum(costs.seconds)
