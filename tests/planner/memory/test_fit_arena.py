"""A plan is found that fits with its holes: one whose buffers are away for longer, or for fewer bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import PlanInfeasible
from lmswap.ir.plan import Plan, Swap
from lmswap.planner.memory.fit_arena import fit_arena

SWAP = Swap(0, "host", 0, 1, 2, 3, 4)


class Steps:
    """Plans take all that they may and are the faster for it; none takes fewer than ``min_resident_bytes``."""

    def __init__(self, min_resident_bytes: int, hole_share: float) -> None:
        self._min_bytes, self._hole_share = min_resident_bytes, hole_share
        self.num_made = 0

    def plan_within(self, max_bytes: int) -> Plan:
        self.num_made += 1
        if max_bytes < self._min_bytes:
            raise PlanInfeasible(budget_bytes=max_bytes, needed_bytes=self._min_bytes, where="f", policy="p")
        return Plan("p", max_bytes, (SWAP,), 1e9 - max_bytes, max_bytes)

    def placed_bytes(self, plan: Plan, share: float) -> int:
        return int((1 + self._hole_share) * plan.predicted_peak_bytes)


@given(st.integers(1, 1000), st.floats(0, 0.5))
def test_layouts_with_3_percent_to_spare_are_found(min_resident_bytes: int, hole_share: float):
    steps = Steps(min_resident_bytes, hole_share)
    try:
        plan, _ = fit_arena(steps.plan_within, steps.placed_bytes, 1000)
    except PlanInfeasible as error:
        assert (1 + hole_share) * min_resident_bytes > 1000 - 1000 / 30
        assert error.needed_bytes >= min_resident_bytes
        assert error.budget_bytes == 1000
    else:
        assert steps.placed_bytes(plan, 0.0) <= 1000
        assert plan.predicted_peak_bytes >= min(1000 / (1 + hole_share), 1000) - 1000 / 30
    assert steps.num_made <= 8


def test_a_plan_without_fragmentation_is_made_once():
    steps = Steps(10, 0.0)
    plan, share = fit_arena(steps.plan_within, steps.placed_bytes, 1000)
    assert (plan.predicted_peak_bytes, share) == (1000, 0.0)
    assert steps.num_made == 1


def test_the_error_for_a_step_that_never_fits_has_the_needed_bytes():
    steps = Steps(2000, 0.1)
    with pytest.raises(PlanInfeasible, match="at least"):
        fit_arena(steps.plan_within, steps.placed_bytes, 1000)
    assert steps.num_made == 1


def test_no_other_plan_is_tried_if_the_smallest_packs_far_too_large():
    steps = Steps(800, 0.5)
    with pytest.raises(PlanInfeasible) as refused:
        fit_arena(steps.plan_within, steps.placed_bytes, 1000)
    assert refused.value.needed_bytes == 1200
    assert steps.num_made == 3  # of 1000 bytes, of 500, and the smallest


def test_needed_bytes_under_fragmentation_are_those_of_an_existing_plan():
    """As with results, of which few lie in a segment of 20 MiB."""
    steps = Steps(200, 0.0)

    def placed_bytes(plan: Plan, share: float) -> int:
        return plan.predicted_peak_bytes + 900

    with pytest.raises(PlanInfeasible) as refused:
        fit_arena(steps.plan_within, placed_bytes, 1000)
    needed_bytes = refused.value.needed_bytes
    plan, _ = fit_arena(steps.plan_within, placed_bytes, needed_bytes)
    assert placed_bytes(plan, 0.0) <= needed_bytes < 1.1 * (200 + 900)


def test_the_fastest_plan_that_fits_is_taken_also_in_less_memory():
    def plan_within(max_bytes: int) -> Plan:
        return Plan("p", max_bytes, (), 1.0 if max_bytes == 800 else 5.0, max_bytes)

    sizes = {1000: 1200, 800: 800}
    plan, _ = fit_arena(plan_within, lambda plan, share: sizes.get(plan.budget_bytes, 900), 1000)
    assert plan.budget_bytes == 800


def test_residencies_are_shortened_no_more_than_needed():
    steps = Steps(10, 0.1)

    def placed_bytes(plan: Plan, share: float) -> int:
        return int(steps.placed_bytes(plan, share) * (1 - 0.2 * share))

    plan, share = fit_arena(steps.plan_within, placed_bytes, 1000)
    assert (steps.num_made, share, plan.budget_bytes) == (1, 0.5, 1000)


def test_a_plan_without_swaps_is_packed_once():
    placed = []

    def placed_bytes(plan: Plan, share: float) -> int:
        placed.append(plan.budget_bytes)
        return plan.budget_bytes + 100

    fit_arena(lambda max_bytes: Plan("p", max_bytes, (), 1.0, min(max_bytes, 800)), placed_bytes, 1000)
    assert len(placed) == len({*placed})
