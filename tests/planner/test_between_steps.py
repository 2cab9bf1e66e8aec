"""Plans whose weights have their only bytes in host copies between steps; graphs that read them fetch them."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible, TierError
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind
from lmswap.ir.schedule import schedule
from lmswap.planner.between_steps import without_weights_between_steps
from tests.cases import FACTOR
from tests.ir.build import Step, build
from tests.ir.strategies import cyclic_steps
from tests.planner.plans import plan_of

# Weights are read in the forward and again, in the reverse order, in the backward.
FROZEN = """
    forward
    f1 2: x WA -> a
    f2 2: a WB -> b
    f3 2: b WC -> y
    backward
    b3 2: t WC -> gc
    b2 2: gc WB -> gb
    b1 2: gb WA -> ga
"""


def frozen(**sizes: int) -> Step:
    return build(FROZEN, weights="WA WB WC", outputs="y", tangents="t", sizes=sizes)


def check_fetches(step: Step, plan: Plan) -> None:
    """Each weight that moves is non-resident at the end, and each prefetch in the segment of its use."""
    runs = schedule(step.program, plan.recomputes).program
    num_ops = len(runs.ops)
    weights = {buffer.id for buffer in step.program.buffers if buffer.kind is BufferKind.WEIGHT}
    moved = {swap.buffer for swap in plan.swaps} & weights
    assert moved == {swap.buffer for swap in plan.swaps if swap.buffer in weights and swap.crosses_end(num_ops)}
    for swap in plan.swaps:
        if swap.buffer in weights:
            in_start, first_use = swap.fetch(num_ops)
            assert swap.out_start is None
            assert runs.segment_of(in_start) == runs.segment_of(first_use)


@pytest.mark.parametrize("budget", range(10, 16))
def test_weights_that_move_are_non_resident_between_steps(budget):
    step = frozen(WA=3, WB=3, WC=3)
    plan = plan_of("auto", step, budget, fetches_weights=True)
    check_fetches(step, plan)
    assert plan.predicted_peak_bytes <= budget


def test_all_that_can_be_swapped_is():
    step = frozen(WA=3, WB=3, WC=3)
    plan = plan_of("swap_all", step, 100, fetches_weights=True)
    check_fetches(step, plan)
    # WC is used by two ops in a row: it is fetched once, the others twice.
    assert len([swap for swap in plan.swaps if step.program.buffers[swap.buffer].nbytes == 3]) == 5


@settings(max_examples=int(40 * FACTOR), deadline=None)
@given(cyclic_steps(), st.floats(0.0, 1.0))
def test_random_plans_leave_no_weight_between_steps(step, share):
    assume(step.program.only_reads_weights)
    memory = StepMemory(step.program, step.costs)
    low, high = int(memory.floor.max(initial=0)), memory.peak.nbytes
    try:
        plan = plan_of("auto", step, max(1, int(low + share * (high - low))), fetches_weights=True)
    except (PlanInfeasible, TierError):
        assume(False)
    check_fetches(step, plan)
    assert without_weights_between_steps(plan, step.program).swaps == plan.swaps
