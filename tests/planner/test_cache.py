from dataclasses import replace

import pytest

from lmswap.analyze.memory import StepMemory
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.planner import make_plan, simulate
from lmswap.planner.cache import CachedPlan, PlanCache, PlannedMemory
from tests.ir.build import build, unit_machine

STEP = build(
    """
    forward
    f1 1: x -> a
    f2 1: a -> b
    f3 1: b -> y
    backward
    g1 1: t a -> gx
    """,
    outputs="y",
    tangents="t",
    gradients="gx",
)
MACHINE = unit_machine()
LIMITS = {"tier": "host", "min_swap_bytes": 1}


def planned() -> CachedPlan:
    return CachedPlan(
        make_plan("none", STEP.program, STEP.costs, MACHINE, budget_bytes=100, **LIMITS),
        STEP.costs,
        MACHINE,
        PlannedMemory(110),
    )


def swapping() -> CachedPlan:
    """`a` is away while f3 runs."""
    plan = Plan("hand-made", 100, (Swap(STEP.id("a"), "host", 0, 2, 2, 3, 3),), 6.0, 0, {"host": 4096})
    peak_bytes = simulate(STEP.program, STEP.costs, MACHINE, plan).peak_bytes
    return CachedPlan(replace(plan, predicted_peak_bytes=peak_bytes), STEP.costs, MACHINE, PlannedMemory(110))


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))


def test_cached_plans_are_read_back_for_the_same_program_only():
    cache = PlanCache(MACHINE, {}, **LIMITS)
    cache.write(STEP.program, planned())
    assert cache.read(STEP.program) == planned()
    assert cache.read(replace(STEP.program, name="other")) is None


def test_plans_for_steps_that_have_shown_their_needs_are_cached_apart():
    cache, spared = PlanCache(MACHINE, {}, **LIMITS), replace(planned(), room=PlannedMemory(110, 5, 7))
    cache.write(STEP.program, spared)
    assert cache.read(STEP.program) is None
    assert cache.read(STEP.program, spares=True) == spared


@pytest.mark.parametrize("streams", [{"update_bytes": 9 * 4096}, {"streams_gradients": True}])
def test_a_plan_that_leaves_room_for_what_streams_is_verified_with_that(streams):
    room = PlannedMemory(10**6, **streams)
    costs = room.with_streams(STEP.program, STEP.costs)
    peak_bytes, plain_bytes = (StepMemory(STEP.program, each).peak.nbytes for each in (costs, STEP.costs))
    plan = make_plan("none", STEP.program, costs, MACHINE, budget_bytes=peak_bytes, **LIMITS)
    assert plan.predicted_peak_bytes == peak_bytes > plain_bytes
    cache, planned = PlanCache(MACHINE, {}, **LIMITS), CachedPlan(plan, STEP.costs, MACHINE, room)
    cache.write(STEP.program, planned)
    assert cache.read(STEP.program) == cache.unpack(STEP.program, cache.pack(planned)) == planned


def test_in_older_files_all_that_was_spared_is_reserve():
    assert PlannedMemory.from_data({"step_bytes": 110, "spared_bytes": 12}) == PlannedMemory(110, 12, 0)


@pytest.mark.parametrize(
    ("machine", "kind", "limits"),
    [
        (unit_machine(out=2.0), {}, LIMITS),
        (replace(MACHINE, name="other"), {}, LIMITS),
        (MACHINE, {"torch": "99"}, LIMITS),
        (MACHINE, {}, {**LIMITS, "min_swap_bytes": 2}),
        (MACHINE, {}, {**LIMITS, "tier": "disk"}),
    ],
)
def test_another_link_machine_version_or_option_has_plans_of_its_own(machine, kind, limits):
    PlanCache(MACHINE, {}, **LIMITS).write(STEP.program, planned())
    assert PlanCache(machine, kind, **limits).read(STEP.program) is None


def test_free_room_in_the_tier_is_that_of_now():
    PlanCache(MACHINE, {}, **LIMITS).write(STEP.program, swapping())
    less = PlanCache(unit_machine(capacity=10_000), {}, **LIMITS).read(STEP.program)
    assert less.machine.tier("host").capacity_bytes == 10_000
    assert PlanCache(unit_machine(capacity=1), {}, **LIMITS).read(STEP.program) is None  # too little: planned again


def test_another_process_gets_the_same_plan_and_checks_it():
    cache = PlanCache(MACHINE, {}, **LIMITS)
    assert cache.unpack(STEP.program, cache.pack(swapping())) == swapping()
    assert PlanCache(unit_machine(capacity=1), {}, **LIMITS).unpack(STEP.program, cache.pack(swapping())) is None


def test_interchangeable_plans_have_one_name():
    cache = PlanCache(MACHINE, {}, **LIMITS)
    assert PlanCache(unit_machine(capacity=1), {}, **LIMITS).name(STEP.program) == cache.name(STEP.program)
    assert PlanCache(MACHINE, {"budget": 1}, **LIMITS).name(STEP.program) != cache.name(STEP.program)
    assert cache.name(replace(STEP.program, name="other")) != cache.name(STEP.program)


@pytest.mark.parametrize(
    ("budget_bytes", "slack_bytes", "serves"),
    [(1000, 0, True), (990, 0, False), (1009, 0, True), (1020, 0, False), (990, 10, True), (1020, 20, True)],
)
def test_a_plan_fits_budgets_near_its_own_that_its_peak_meets(budget_bytes, slack_bytes, serves):
    plan = Plan("auto", 900, (), 1.0, 1000, recomputes=(Recompute(0, 2),))  # the rest was lost to holes
    assert CachedPlan(plan, STEP.costs, MACHINE, PlannedMemory(1000)).fits(budget_bytes, slack_bytes) is serves


def test_a_plan_that_keeps_everything_serves_every_budget_that_it_fits():
    plan = Plan("auto", 1000, (), 1.0, 500)
    planned = CachedPlan(plan, STEP.costs, MACHINE, PlannedMemory(500))
    assert planned.fits(500, 0)
    assert planned.fits(10**9, 0)
    assert not planned.fits(499, 0)
