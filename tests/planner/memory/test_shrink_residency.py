"""Swapped buffers that are away for longer: the plan keeps every rule, and takes no more time or memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from benchmarks.programs.corpus import load_machine, load_program
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.ir.plan import Plan, Swap
from lmswap.planner import make_plan, reprice, simulate, verify
from lmswap.planner.memory.pack_arena import pack_arena
from lmswap.planner.memory.shrink_residency import shrink_residency
from lmswap.planner.problem import PLANNED_LINK_SHARE
from tests.ir.build import Step, build, unit_machine
from tests.ir.strategies import machines, steps
from tests.planner.random_swaps import random_plans

SHARES = st.sampled_from([0.5, 1.0])

STEP = build(
    """
    forward
    f1 1: x -> a
    f2 1: a -> b
    f3 9: b -> c
    f4 9: c -> y
    backward
    g4 9: t c -> gc
    g3 9: gc b -> gb
    g2 1: gb a -> gx
    """,
    sizes={"a": 2},
    outputs="y",
    tangents="t",
    gradients="gx",
)


def resident_bytes(step: Step, plan: Plan) -> np.ndarray:
    """By op: what the swaps of ``plan`` leave on the device."""
    curve = StepMemory(step.program, step.costs).curve.copy()
    for swap in plan.swaps:
        curve[swap.release : swap.in_start] -= step.program.buffers[swap.buffer].nbytes
    return curve


@given(st.data(), SHARES, machines())
def test_the_plan_keeps_every_rule_and_no_op_finds_more_than_before(data: st.DataObject, share: float, machine):
    step = data.draw(steps())
    plan = data.draw(random_plans(step))
    shorter = shrink_residency(plan, step.program, step.costs, machine, share=share)
    event(f"something moved: {shorter != plan}")
    predicted = simulate(step.program, step.costs, machine, shorter)
    verify(step.program, step.costs, machine, replace(shorter, predicted_peak_bytes=predicted.peak_bytes))
    assert (resident_bytes(step, shorter) <= resident_bytes(step, plan)).all()


@given(st.data(), SHARES)
def test_the_step_takes_no_longer_at_the_planned_link_rate(data: st.DataObject, share: float):
    step = data.draw(steps())
    plan = data.draw(random_plans(step))
    shorter = shrink_residency(plan, step.program, step.costs, unit_machine(), share=share)
    machine = unit_machine().with_links_at(PLANNED_LINK_SHARE)
    before, after = (simulate(step.program, step.costs, machine, each).seconds for each in (plan, shorter))
    assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize(("share", "release", "in_start"), [(0.5, 4, 4), (1.0, 3, 5)])
def test_a_buffer_is_released_when_copied_and_prefetched_at_its_position(share, release, in_start):
    lazy = Swap(STEP.id("a"), "host", 0, out_start=2, release=4, in_start=4, first_use=6)
    plan = Plan("hand-made", 2**30, (lazy,), 0.0, 0, {"host": 4096})
    (swap,) = shrink_residency(plan, STEP.program, STEP.costs, unit_machine(), share=share).swaps
    assert (swap.out_start, swap.first_use) == (2, 6)
    assert (swap.release, swap.in_start) == (release, in_start)


@pytest.mark.parametrize(("name", "percent"), [("unet3d_192_bf16", 30), ("vit", 30), ("gpt", 50)])
def test_arenas_of_large_steps_have_little_fragmentation(name: str, percent: int):
    program, machine = load_program(name), load_machine("h200_gen5")
    costs = roofline(program, machine)
    limits = {"tier": "host", "min_swap_bytes": 2**20}
    budget_bytes = StepMemory(program, costs).peak.nbytes * percent // 100
    plan = make_plan("auto", program, costs, machine, budget_bytes=budget_bytes, **limits)
    shorter = reprice(shrink_residency(plan, program, costs, machine, share=1.0), program, costs, machine, **limits)
    assert shorter.predicted_seconds <= plan.predicted_seconds * (1 + 1e-3)
    wide, narrow = (pack_arena(program, costs, each).arena_bytes for each in (plan, shorter))
    assert narrow <= 1.02 * shorter.predicted_peak_bytes
    assert narrow < wide
