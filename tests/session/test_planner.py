"""A search returns the retention that its plan assumes, and changes nothing."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lmswap.errors import PlanInfeasible
from lmswap.options import Options
from lmswap.planner import make_plan
from lmswap.session.allowance import Allowance
from lmswap.session.engine_setup import KnownMachine
from lmswap.session.plan_request import PlanRequest
from lmswap.session.planner import Planner
from lmswap.session.retention import Retention
from tests.ir.build import build, unit_machine

MIB = 2**20
STEP = build(
    """
    forward
    f1 1: x W -> a
    f2 1: a -> y
    backward
    g1 1: t a -> gW
    """,
    sizes={"a": 64 * MIB, "y": 32 * MIB, "gW": 32 * MIB},
    outputs="y",
    tangents="t",
    gradients="gW",
)
MACHINE = unit_machine()


def planner(*, arena: object | None) -> Planner:
    memory = SimpleNamespace(compact=lambda: None, uncounted=nullcontext)
    retention = SimpleNamespace(assumed=Retention.ACCUMULATED, choices=tuple(Retention))
    given = {"options": Options.parse("1GiB", tier="host"), "engine": SimpleNamespace(arena=arena), "memory": memory}
    given |= {"budget": None, "retention": retention, "machine": KnownMachine(MACHINE, lambda: MACHINE)}
    return Planner(SimpleNamespace(**given, plan_notes=[]))


def request(step_bytes: int, **fields) -> PlanRequest:
    allowance = Allowance(2**30, 0, 0, 0, 0).of_step_bytes(step_bytes)
    return PlanRequest(STEP.program, STEP.costs, MACHINE, allowance, Retention.ACCUMULATED, "none", **fields)


def needed_bytes(retention: Retention) -> int:
    with_arena = planner(arena=object())
    _, planned = with_arena.search(request(2**40))
    return with_arena.layout(STEP.program, STEP.costs, planned.plan, retention).total_bytes


def test_plans_that_assume_less_retention_need_less():
    sizes = [needed_bytes(retention) for retention in Retention]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2


def test_every_search_assumes_the_most_retention_with_which_a_plan_fits():
    with_arena = planner(arena=object())
    for retention in (Retention.NO_OVERLAP, Retention.UNTIL_STEP_END, Retention.ACCUMULATED, Retention.NO_OVERLAP):
        limit_bytes = needed_bytes(retention)
        met, planned = with_arena.search(request(limit_bytes))
        assert met.retention is min(each for each in Retention if needed_bytes(each) <= limit_bytes)
        assert met.allowance.step_bytes >= planned.plan.predicted_peak_bytes


def test_a_refusal_assumes_the_least_retention_and_the_whole_budget():
    with_arena = planner(arena=object())
    least_bytes = needed_bytes(Retention.NO_OVERLAP)
    refused = request(least_bytes - 1)
    with pytest.raises(PlanInfeasible) as refusal:
        with_arena.search(refused)
    assert refusal.value.needed_bytes == least_bytes + refused.allowance.fixed_bytes
    assert with_arena.search(request(least_bytes))[0].retention is Retention.NO_OVERLAP


def test_a_refused_budget_is_searched_once_for_all_retentions(monkeypatch):
    searched = []

    def make(*inputs, budget_bytes, **limits):
        searched.append(budget_bytes)
        return make_plan(*inputs, budget_bytes=budget_bytes, **limits)

    monkeypatch.setattr("lmswap.session.planner.make_plan", make)
    with pytest.raises(PlanInfeasible):
        planner(arena=object()).search(request(1))
    assert searched and len(searched) == len({*searched})


def test_memory_reserved_ahead_is_released_if_a_plan_needs_it():
    without_arena = planner(arena=None)
    _, planned = without_arena.search(request(2**40))
    for spare_bytes, ahead_bytes in ((0, 0), (8 * MIB, 8 * MIB)):
        wanted = request(planned.plan.predicted_peak_bytes + spare_bytes, ahead_bytes=8 * MIB)
        met, _ = without_arena.search(wanted)
        assert met.allowance.ahead_bytes == ahead_bytes
        assert met.allowance.step_bytes == planned.plan.predicted_peak_bytes + spare_bytes - ahead_bytes


def test_the_first_layout_assumes_the_most_retention_that_fits():
    with_arena = planner(arena=object())
    _, planned = with_arena.search(request(2**40))
    for retention in Retention:
        max_bytes = needed_bytes(retention)
        places, assumed = with_arena.first_layout(STEP.program, STEP.costs, planned.plan, tuple(Retention), max_bytes)
        assert places.total_bytes <= max_bytes
        assert assumed <= retention
    places, assumed = with_arena.first_layout(STEP.program, STEP.costs, planned.plan, tuple(Retention), 1)
    assert (assumed, places.total_bytes) == (Retention.ACCUMULATED, needed_bytes(Retention.ACCUMULATED))
