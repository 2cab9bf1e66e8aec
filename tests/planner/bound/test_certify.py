"""The certificate is below every plan, above the sum of the ops where that can be known, and cannot be forged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible, PlanInvalid
from lmswap.ir.certificate import Certificate
from lmswap.ir.program import BufferKind
from lmswap.planner import POLICIES, make_plan
from lmswap.planner.bound.certify import certify
from lmswap.planner.bound.verify_certificate import verify_certificate
from tests.ir.build import build, unit_machine
from tests.ir.strategies import machines, steps
from tests.planner.brute_force import faster_plan
from tests.planner.instances import INSTANCES, Instance
from tests.planner.tiny_steps import tight_steps


def bound(step, machine, budget_bytes, min_swap_bytes=1):
    """The certificate, verified."""
    question = {"budget_bytes": budget_bytes, "tier": "host", "min_swap_bytes": min_swap_bytes}
    found = certify(StepMemory(step.program, step.costs), machine, **question)
    verify_certificate(step.program, step.costs, machine, found, **question)
    return found


def check_optimum(step, budget_bytes, seconds):
    assert faster_plan(step, unit_machine(), budget_bytes, seconds + 1e-6) is not None
    assert faster_plan(step, unit_machine(), budget_bytes, seconds - 1e-6) is None


# --- by hand ---------------------------------------------------------------------------------------------------------

STEP = build(
    """
    inference
    f1 2!random: x -> a
    f2 1: x -> b
    f3 3: b -> m
    f4 1: a -> y
    """,
    sizes={"x": 0, "a": 4, "m": 4},
)


def test_bound_of_a_copy_that_is_exposed_on_both_sides_of_its_cut():
    # f3 would hold a b m = 4 + 1 + 4 = 9. At budget 5 all of a is away then: out in 4 s after f1, for which f2 takes
    # 1 s; in in 4 s after f3, beside f4's 1 s as far as the zone after the last cut, f3, shows: 2 + 4 + 3 + 4.
    assert bound(STEP, unit_machine(), 5).seconds == pytest.approx(13)
    # At budget 7 half of a is enough for the relaxation, which knows no whole buffers: 2 + 2 + 3 + 2.
    assert bound(STEP, unit_machine(), 7).seconds == pytest.approx(9)
    for budget_bytes in (5, 7):
        check_optimum(STEP, budget_bytes, 2 + 4 + 3 + 4 + 1)


def test_bound_of_a_buffer_that_is_cheaper_to_recompute_than_to_copy():
    step = replace(
        STEP,
        program=replace(STEP.program, ops=(replace(STEP.program.ops[0], is_repeatable=True), *STEP.program.ops[1:])),
    )
    # f1 again takes 2 s. The relaxation hides the copy of a quarter of a under f2 and f4, and pays for the rest of what
    # must be away: three quarters of f1's 2 s at budget 5, one quarter at 7.
    assert bound(step, unit_machine(), 5).seconds == pytest.approx(7 + 1.5)
    assert bound(step, unit_machine(), 7).seconds == pytest.approx(7 + 0.5)
    for budget_bytes in (5, 7):
        check_optimum(step, budget_bytes, 7 + 2)


def test_a_small_buffer_that_is_not_recomputable_is_always_resident():
    assert bound(STEP, unit_machine(), 8, min_swap_bytes=4).seconds < math.inf
    assert bound(STEP, unit_machine(), 8, min_swap_bytes=5).seconds == math.inf


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_bound_is_below_the_known_optimum(instance: Instance):
    found = bound(instance.step, instance.machine, instance.budget_bytes)
    assert found.seconds <= (instance.optimum_seconds or instance.swap_seconds) + 1e-9


# --- any step --------------------------------------------------------------------------------------------------------


@given(tight_steps(), machines())
def test_bound_is_below_the_optimum_of_tiny_steps(tight, machine):
    step, budget_bytes = tight
    assert faster_plan(step, machine, budget_bytes, bound(step, machine, budget_bytes).seconds * (1 - 1e-9)) is None


@pytest.mark.slow
@given(st.data(), steps(), machines(), st.integers(0, 3))
def test_bound_is_below_every_policys_plan(data, step, machine, min_swap_bytes):
    memory = StepMemory(step.program, step.costs)
    # With less than its largest op no policy has a plan.
    budget_bytes = data.draw(st.integers(int(memory.floor.max()), memory.peak.nbytes))
    found = bound(step, machine, budget_bytes, min_swap_bytes)
    assert found.seconds >= sum(step.costs.seconds)
    for policy in POLICIES:
        try:
            plan = make_plan(
                policy,
                step.program,
                step.costs,
                machine,
                budget_bytes=budget_bytes,
                tier="host",
                min_swap_bytes=min_swap_bytes,
            )
        except PlanInfeasible:
            continue
        assert found.seconds <= plan.predicted_seconds * (1 + 1e-9)


@given(steps(), machines(), st.integers(0, 3))
def test_bound_is_what_the_ops_or_the_host_take_when_the_step_fits(step, machine, spare_bytes):
    peak_bytes = StepMemory(step.program, step.costs).peak.nbytes
    host_seconds = machine.host.seconds(len(step.program.ops), 0) if machine.host else 0.0
    least_seconds = max(sum(step.costs.seconds), host_seconds)
    assert bound(step, machine, peak_bytes + spare_bytes) == Certificate(least_seconds)


@given(st.data(), steps(), machines())
def test_a_bound_for_a_budget_holds_for_smaller_budgets(data, step, machine):
    peak_bytes = StepMemory(step.program, step.costs).peak.nbytes
    small, large = sorted(data.draw(st.lists(st.integers(0, peak_bytes), min_size=2, max_size=2)))
    certificate = bound(step, machine, large)
    verify_certificate(
        step.program, step.costs, machine, certificate, budget_bytes=small, tier="host", min_swap_bytes=1
    )


# --- forged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forged",
    [
        {"seconds": 13.001},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"cuts": (0, 2, 3)},
        {"cuts": (2, 1, 0)},
        {"cuts": (0, 1, 4)},
        {"memory_prices": (-1.0, 0.0, 9.0)},
        {"memory_prices": (math.nan, 0.0, 9.0)},
        {"memory_prices": (0.0, 1.0)},
        {"out_prices": (1.0, 1.0, 1.0, 0.0)},
        {"in_prices": (0.0, 0.0, 0.5, 1.0)},
        {"in_prices": (0.0, 0.0, 0.0, 1.5)},
    ],
    ids=str,
)
def test_prices_that_do_not_prove_the_seconds_are_refused(forged):
    # a's byte is worth 2 s during f3: 1 s on the out lane from f1 to f3, 1 s on the in lane after f3.
    question = {"budget_bytes": 5, "tier": "host", "min_swap_bytes": 1}
    honest = Certificate(13.0, (0, 1, 2), (0.0, 0.0, 2.0), (0.0, 1.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0))
    verify_certificate(STEP.program, STEP.costs, unit_machine(), honest, **question)
    with pytest.raises(PlanInvalid, match="certificate"):
        verify_certificate(STEP.program, STEP.costs, unit_machine(), replace(honest, **forged), **question)


@pytest.mark.parametrize("cut", range(5))
def test_gradients_that_are_added_up_count_until_their_last_use(cut):
    # ga is free while g3 fills the budget: a plan that keeps all fits, so no more than the ops' 5 s can be proven.
    step = build(
        """
        forward
        f1 1: X -> a
        backward
        g1 1: t a -> ga p
        g2 1: p -> q
        g3 1: q -> gb
        g4 1: gb -> gc
        """,
        sizes={"ga": 4, "gb": 4, "gc": 0},
        tangents="t",
        gradients="ga gb gc",
    )
    program = step.program.with_gradients(BufferKind.ACCUMULATED_GRADIENT)
    budget_bytes = StepMemory(program, step.costs).peak.nbytes
    question = {"budget_bytes": budget_bytes, "tier": "host", "min_swap_bytes": 1}
    forged = Certificate(5.01, (cut,), (0.0,), (0.0, 0.0), (0.0, 0.0))
    verify_certificate(program, step.costs, unit_machine(), replace(forged, seconds=5.0), **question)
    with pytest.raises(PlanInvalid, match="certificate"):
        verify_certificate(program, step.costs, unit_machine(), forged, **question)
