"""A planning problem for tests: a step, a budget, and by default the unit machine."""

from __future__ import annotations

from typing import Any

from lmswap.analyze.memory import StepMemory
from lmswap.ir.machine import Machine
from lmswap.planner.problem import Problem
from tests.ir.build import Step, unit_machine


def problem_of(step: Step, budget_bytes: int, machine: Machine | None = None, **changes: Any) -> Problem:
    """Buffers of a byte and more may be swapped to the host."""
    machine = machine or unit_machine()
    return Problem(StepMemory(step.program, step.costs), machine, machine.tier("host"), budget_bytes, 1, **changes)
