"""The plan of `lmswap plan` within a budget that counts what is beside the step."""

from dataclasses import replace

import pytest

from lmswap.analyze.cost import unit
from lmswap.analyze.memory import StepMemory
from lmswap.cli.step_plan import plan_step, plan_within
from lmswap.ir.fixed_memory import FixedMemory
from tests.reporting.small_step import MACHINE, MIB, PROGRAM

FIXED = FixedMemory(before_bytes=MIB, margin_bytes=3 * MIB // 2, unmoved_margin_bytes=MIB)
STEP = replace(PROGRAM, fixed=FIXED)
MEMORY = StepMemory(STEP, unit(STEP))


@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
def test_nothing_moves_where_all_fits_with_the_margin_of_such_a_step(policy):
    limits = {"tier": "disk", "min_swap_bytes": 4096}
    budget_bytes = MEMORY.peak.nbytes + FIXED.total_bytes(is_unmoved=True)
    assert not plan_within(policy, MEMORY, MACHINE, budget_bytes=budget_bytes, **limits).moves
    assert plan_within("auto", MEMORY, MACHINE, budget_bytes=budget_bytes - 1, **limits).moves


def test_the_drawn_step_has_the_peak_of_the_text():
    fixed = FixedMemory(before_bytes=2 * MIB, reserve_bytes=MIB, margin_bytes=MIB, unmoved_margin_bytes=MIB)
    step = replace(PROGRAM, fixed=fixed)
    found = plan_step("none", StepMemory(step, unit(step)), MACHINE, "64MiB", tier="disk", min_swap_bytes=4096)
    assert found.predicted().peak_bytes == found.peak_bytes == found.plan.predicted_peak_bytes + 3 * MIB
