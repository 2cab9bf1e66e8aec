"""The exact planner finds the optimum of small steps, and `auto` is as good there."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given

from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible
from lmswap.ir.machine import Link, Rate
from lmswap.planner import _core, make_plan, search
from lmswap.planner.search import plan_exactly, plan_search
from tests.ir.build import Step, build, unit_machine
from tests.ir.strategies import machines
from tests.planner.brute_force import optimum, tight_steps
from tests.planner.problems import problem_of


def random_step(seed: int) -> tuple[Step, int]:
    """Six to eight ops, sizes 1 to 4, and a budget between the least that any plan needs and what keeping all needs."""
    draw = random.Random(seed)
    lines, num_ops = ["inference"], draw.randint(6, 8)
    for op in range(num_ops):
        reads = {f"b{draw.randrange(op)}" for _ in range(draw.randint(0, 1))} if op > 1 else set()
        reads.add(f"b{op - 1}" if op else "x")
        lines.append(
            f"f{op} {draw.randint(0, 4)}{draw.choice(['', '', '!random'])}: {' '.join(sorted(reads))} -> b{op}"
        )
    step = build("\n".join(lines), sizes={"x": 0} | {f"b{op}": draw.randint(1, 4) for op in range(num_ops)})
    memory = StepMemory(step.program, step.costs)
    return step, draw.randint(int(memory.floor.max()), int(memory.curve.max()))


@given(tight_steps(), machines())
def test_no_plan_that_can_be_tried_is_faster(tight, machine):
    step, budget_bytes = tight
    plan = plan_exactly(problem_of(step, budget_bytes, machine, link_share=1.0), policy="exact")
    least = optimum(step, machine, budget_bytes)
    if plan is None:
        assert least == float("inf")
    else:
        assert plan.predicted_seconds <= least * (1 + 1e-9)


def test_auto_is_near_the_optimum_of_random_steps(monkeypatch):
    ratios = []
    for seed in range(150):
        step, budget_bytes = random_step(seed)
        machine = unit_machine(out=random.Random(seed).choice([0.5, 1.0, 2.0]))
        try:
            auto = make_plan(
                "auto", step.program, step.costs, machine, budget_bytes=budget_bytes, tier="host", min_swap_bytes=1
            )
        except PlanInfeasible:
            auto = None
        with monkeypatch.context() as patch:
            patch.setattr(search, "_MOST_EXACT_STATES", 3_000_000)
            best = plan_exactly(problem_of(step, budget_bytes, machine, link_share=1.0), policy="exact")
        assert (auto is None) == (best is None)
        if auto is not None and best is not None:
            ratios.append(auto.predicted_seconds / best.predicted_seconds if best.predicted_seconds else 1.0)
    assert len(ratios) > 100
    assert mean(ratios) <= 1.01
    assert max(ratios) <= 1.10


def test_the_search_alone_is_never_faster_than_the_optimum():
    for seed in range(60):
        step, budget_bytes = random_step(seed)
        problem = problem_of(step, budget_bytes, unit_machine(), link_share=1.0)
        best = plan_exactly(problem, policy="exact")
        try:
            found = plan_search(problem, policy="search")
        except PlanInfeasible:
            continue
        assert best is None or found.predicted_seconds >= best.predicted_seconds * (1 - 1e-12)


def test_the_search_expects_the_seconds_that_the_simulator_finds():
    link = Link(Rate.constant(1.0), Rate.constant(2.0), both_factor=0.75, compute_factor=0.5)
    machine, num_swaps = unit_machine().with_link("host", link), 0
    for seed in range(60):
        step, budget_bytes = random_step(seed)
        problem = problem_of(step, budget_bytes, machine, link_share=1.0)
        found = _core.search(
            search._make_step(problem),
            search._make_link(problem, 1.0),
            search._limits(problem, may_swap=True, may_recompute=False),
            most_evaluations=500,
            target_seconds=0.0,
            seed=seed,
        )
        if found.fits:
            plan = search._finish(problem, "search", found)
            assert plan.predicted_seconds == pytest.approx(found.seconds)
            num_swaps += len(plan.swaps)
    assert num_swaps > 10


def test_steps_too_large_for_exact_search_use_the_heuristic_search():
    lines = "\n".join(f"f{op} 1: {'x' if not op else f'b{op - 1}'} -> b{op}" for op in range(40))
    step = build("inference\n" + lines)
    assert plan_exactly(problem_of(step, 3, unit_machine(), link_share=1.0), policy="exact") is None
    with pytest.raises(PlanInfeasible):
        plan_search(problem_of(step, 1, unit_machine(), link_share=1.0), policy="search")
