"""The exact planner finds the optimum of small steps, and `auto` is as good there."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible, PlanInvalid
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Link, Machine, Rate
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.planner import _core, make_plan, search
from lmswap.planner.bound.certify import certify
from lmswap.planner.bound.verify_certificate import verify_certificate
from lmswap.planner.search import Found, find, plan_exactly
from tests.ir.build import Step, build, unit_machine
from tests.ir.strategies import machines
from tests.planner.brute_force import faster_plan
from tests.planner.problems import problem_of
from tests.planner.tiny_steps import tight_steps, tiny_step

STORED = Path(__file__).parents[1] / "stored" / "planner"


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
    assert faster_plan(step, machine, budget_bytes, just_below(plan)) is None


def just_below(plan: Plan | None) -> float:
    return plan.predicted_seconds * (1 - 1e-9) if plan else math.inf


def check_auto(step: Step, machine: Machine, budget_bytes: int, min_swap_bytes: int = 1) -> None:
    """No plan is faster than that of policy auto, where it is proven the best, nor below the bound."""
    limits = {"budget_bytes": budget_bytes, "tier": "host", "min_swap_bytes": min_swap_bytes}
    try:
        plan = make_plan("auto", step.program, step.costs, machine, **limits)
    except PlanInfeasible:
        assert faster_plan(step, machine, budget_bytes, math.inf, max_recomputes=1) is None
        return
    best = faster_plan(step, machine, budget_bytes, just_below(plan), min_swap_bytes=min_swap_bytes)
    assert best is None or not plan.is_optimal
    bound = certify(StepMemory(step.program, step.costs), machine, **limits)  # a plan's own is cut down to its seconds
    assert bound.seconds <= (best or plan).predicted_seconds * (1 + 1e-9)
    forged = replace(bound, seconds=(best or plan).predicted_seconds * 1.001)
    with pytest.raises(PlanInvalid, match="certificate"):
        verify_certificate(step.program, step.costs, machine, forged, **limits)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_than_auto_in_tiny_training_steps(seed):
    check_auto(*tiny_step(seed, max_ops=7))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 200))
def test_no_plan_is_faster_than_auto_in_small_training_steps(seed):
    check_auto(*tiny_step(seed, max_ops=8))


@given(st.integers(1000, 10**9))
def test_no_plan_is_faster_than_auto_in_any_tiny_step(seed):
    check_auto(*tiny_step(seed, max_ops=6))


# An independent search found these plans.
@pytest.mark.parametrize("file", sorted(STORED.glob("*.json")), ids=lambda file: file.stem)
def test_auto_is_as_fast_as_a_known_plan(file):
    known = json.loads(file.read_text())
    program = Program.from_json(json.dumps(known["program"]))
    costs = OpCosts(tuple(known["op_seconds"]), tuple(known["scratch_bytes"]), "unit")
    rates = [Rate.constant(known[f"{way}_bytes_per_second"], known[f"{way}_latency"]) for way in ("out", "in")]
    machine = unit_machine().with_link("host", Link(*rates, **known["link_factors"]))
    limits = {"budget_bytes": known["budget_bytes"], "min_swap_bytes": known["min_swap_bytes"]}
    plan = make_plan("auto", program, costs, machine, tier="host", **limits)
    assert plan.is_optimal
    assert plan.predicted_seconds <= known["best_seconds"] * (1 + 1e-9)


# Ops that write an output too are recomputed: b would be away for 8 s.
RECOMPUTED_OUTPUT = """
    forward
    f0 1: X -> a
    f1 1: a -> y b
    f2 1: a -> u
    f3 1: u -> z
    backward
    g3 1: t b a -> gx
"""


def test_an_op_that_writes_an_output_is_recomputed():
    step = build(RECOMPUTED_OUTPUT, sizes={"b": 4, "u": 6}, outputs="y z", tangents="t", gradients="gx")
    plan = plan_exactly(problem_of(step, 10, unit_machine(), link_share=1.0), policy="exact")
    assert plan is not None
    assert plan.predicted_seconds == pytest.approx(6.0)
    assert [(recompute.op, recompute.position) for recompute in plan.recomputes] == [(1, 4)]


def test_an_op_that_writes_what_the_step_is_given_is_not_recomputed():
    # f0 again would make a second c, of 3 bytes, which f4 reads.
    text = """
        forward
        f0 1: X -> a c
        f1 1: a -> b
        f2 9: b -> m
        f3 1: m -> n
        f4 1: n a c -> y
    """
    step = build(text, sizes={"a": 4, "c": 3, "m": 5, "n": 5}, outputs="y")
    given_c = [replace(b, kind=BufferKind.INPUT) if b.id == step.id("c") else b for b in step.program.buffers]
    program = replace(step.program, buffers=tuple(given_c))
    slow_link = unit_machine(out=0.1, into=0.1)
    plan = make_plan("auto", program, step.costs, slow_link, budget_bytes=10, tier="host", min_swap_bytes=1)
    assert not plan.recomputes


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
            patch.setattr(search, "_MAX_EXACT_STATES", 3_000_000)
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
            found = find(problem, policy="search")
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
            max_evaluations=500,
            target_seconds=0.0,
            seed=seed,
        )
        if found.fits:
            expected = Found(problem, "search", found)
            plan = expected.plan()
            assert plan.predicted_seconds == pytest.approx(found.seconds)
            assert plan.predicted_seconds == pytest.approx(expected.predicted_seconds, rel=1e-12)
            num_swaps += len(plan.swaps)
    assert num_swaps > 10


def test_steps_too_large_for_exact_search_use_the_heuristic_search():
    lines = "\n".join(f"f{op} 1: {'x' if not op else f'b{op - 1}'} -> b{op}" for op in range(40))
    step = build("inference\n" + lines)
    assert plan_exactly(problem_of(step, 3, unit_machine(), link_share=1.0), policy="exact") is None
    with pytest.raises(PlanInfeasible):
        find(problem_of(step, 1, unit_machine(), link_share=1.0), policy="search")
