"""Checkpointed blocks: dropped buffers and recomputes, by hand; any step; bitwise results of a real model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmswap
from benchmarks.baselines import plan_baseline
from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible
from lmswap.ir.plan import Recompute
from lmswap.ir.schedule import schedule
from tests.ir.build import build, unit_machine
from tests.ir.strategies import steps
from tests.models import CASES

# Two layers: each makes two tensors for itself and hands one on. The backward wants all of them.
LAYERS = """
    forward
    f1@net.0.in 1: x -> a
    f2@net.0.act {act}: a -> b
    f3@net.0 1: b -> c
    f4@net.1.in 2: c -> d
    f5@net.1.act 2: d -> e
    f6@net.1 2: e -> z
    f7 1: z -> y
    backward
    g7 1: t z -> gz
    g6 1: e gz -> ge
    g5 1: d ge -> gd
    g4 1: c gd -> gc
    g3 1: b gc -> gb
    g2 1: a gb -> ga
    g1 1: x ga -> gx
"""


def layers(act: str = "1"):
    sizes = {"a": 4, "b": 4, "d": 4, "e": 4}
    text = LAYERS.format(act=act)
    return build(text, sizes=sizes, scratch={"f7": 20}, outputs="y", tangents="t", gradients="gx")


def with_modules(step, module):
    ops = tuple(replace(op, module=module(op.module)) for op in step.program.ops)
    return replace(step, program=replace(step.program, ops=ops))


def plan_of(step, budget_bytes):
    return plan_baseline(
        "checkpoint",
        step.program,
        step.costs,
        unit_machine(),
        budget_bytes=budget_bytes,
        tier="host",
        min_swap_bytes=1,
    )


def recomputes_of(step, plan):
    ops = step.program.ops
    return [(ops[recompute.op].name, ops[recompute.position].name) for recompute in plan.recomputes]


def seconds_of(step, recomputes):
    return sum(schedule(step.program, recomputes).costs(step.costs).seconds)


def test_a_step_that_fits_is_not_checkpointed():
    # f7: a b d e 16, c z y 3, scratch 20
    plan = plan_of(layers(), 39)
    assert (plan.recomputes, plan.swaps, plan.predicted_peak_bytes) == ((), (), 39)


def test_the_first_block_is_recomputed_up_to_its_last_needed_op():
    # Without a and b. c was passed on, so f3 is not recomputed; at depth 3 each block passes on all that it makes.
    step = layers()
    for budget_bytes in (38, 31):
        plan = plan_of(step, budget_bytes)
        assert recomputes_of(step, plan) == [("f1", "g3"), ("f2", "g3")]
        assert plan.predicted_peak_bytes == 31
        assert plan.predicted_seconds == sum(step.costs.seconds) + 2


def test_as_many_blocks_as_the_budget_requires():
    step = layers()
    for budget_bytes in (30, 23):
        plan = plan_of(step, budget_bytes)
        assert recomputes_of(step, plan) == [("f4", "g6"), ("f5", "g6"), ("f1", "g3"), ("f2", "g3")]
        assert plan.predicted_peak_bytes == 23
        assert plan.predicted_seconds == sum(step.costs.seconds) + 2 + 4


def test_a_depth_that_costs_more_is_taken_where_others_do_not_fit():
    # Of all of net only z is passed on: f7 has z y 2 and 20, g6 a b c d e 17 and y t gz ge 4.
    step = layers()
    assert recomputes_of(step, plan_of(step, 22)) == [(f"f{number}", "g6") for number in range(1, 6)]


def test_infeasible_states_what_would_fit():
    step = layers()
    with pytest.raises(PlanInfeasible) as found:
        plan_of(step, 21)
    assert (found.value.needed_bytes, found.value.where) == (22, "op 6 'f7' (test.py:7 f7)")
    assert ("z", 1) in found.value.live
    with pytest.raises(PlanInfeasible) as found:
        plan_of(with_modules(step, lambda _: ""), 38)
    assert found.value.needed_bytes == 39


def test_results_of_random_ops_are_kept():
    step = layers("1!random")
    assert recomputes_of(step, plan_of(step, 35)) == [("f1", "g2")]


def test_outputs_of_a_block_are_kept():
    # s is a U-Net's skip: net.1 reads it, so net.0 has handed it on; a is its own.
    step = build(
        """
        forward
        f1@net.0 1: X -> a
        f2@net.0 1: a -> s
        f3@net.0 1: s -> c
        f4@net.1 1: c s -> y
        backward
        g3 1: t s -> gc
        g2 1: s a gc -> gx
        """,
        sizes={"a": 2, "s": 2},
        scratch={"f4": 5},
        outputs="y",
        tangents="t",
        gradients="gx",
    )
    plan = plan_of(step, 10)  # f4: a s c y 6 and 5
    assert (recomputes_of(step, plan), plan.predicted_peak_bytes) == ([("f1", "g2")], 9)


@given(data=st.data(), step=steps())
def test_the_step_is_slower_by_the_recomputes_and_nothing_is_swapped(data, step):
    peak_bytes = StepMemory(step.program, step.costs).peak.nbytes
    try:
        plan = plan_of(step, data.draw(st.integers(0, peak_bytes)))
    except PlanInfeasible:
        return
    assert plan.swaps == ()
    assert plan.predicted_seconds == pytest.approx(seconds_of(step, plan.recomputes))
    assert len({recompute.op for recompute in plan.recomputes}) == len(plan.recomputes)
    assert all(isinstance(recompute, Recompute) for recompute in plan.recomputes)


@pytest.mark.parametrize("name", ["resnet", "encoder"])
def test_modules_of_enabled_models_have_paths(name):
    model = lmswap.enable(CASES[name].make(), policy="none")
    CASES[name].loss(model(CASES[name].batch())).backward()
    modules = {op.module for op in lmswap.program(model).ops}
    assert any(path.count(".") for path in modules)
    assert not any("[" in path for path in modules)
    lmswap.disable(model)
