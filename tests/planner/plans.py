"""Plans of small steps, which move any buffer to the host."""

from __future__ import annotations

from typing import Any

from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.planner import make_plan
from tests.ir.build import Step, unit_machine


def plan_of(policy: str, step: Step, budget_bytes: int, machine: Machine | None = None, **parameters: Any) -> Plan:
    """The plan for ``step``, on the unit machine unless ``machine`` is given; ``parameters`` are `make_plan`'s."""
    options = {"tier": "host", "min_swap_bytes": 1} | parameters
    return make_plan(policy, step.program, step.costs, machine or unit_machine(), budget_bytes=budget_bytes, **options)
