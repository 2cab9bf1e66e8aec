"""The margin of a budget is no more than steps may grow by: less if nothing is swapped, or growth is known."""

import pytest
import torch

import lmswap
from lmswap.errors import PlanInfeasible
from tests.models import LARGE, tight_budget
from tests.resident import memory_of_tensors
from tests.session.training import train
from tests.training import same_bits

pytestmark = [
    pytest.mark.cpu_only("on a GPU the margin is what torch's allocator rounds up"),
    pytest.mark.usefixtures("no_garbage"),
]


@pytest.fixture(scope="module", autouse=True)
def _resident_memory_is_the_heap():
    with memory_of_tensors():
        yield


@pytest.fixture(scope="module")
def unplanned(_resident_memory_is_the_heap):
    return train(LARGE, policy="none", num_steps=6)


@pytest.mark.usefixtures("unmoved_margin")
def test_a_step_that_fits_unchanged_runs_even_if_no_swapping_plan_fits(unplanned):
    expected, unmoved = unplanned
    budget = unmoved.predicted_peak_bytes + 10 * 2**20
    actual, report = train(LARGE, budget=budget, policy="auto", num_steps=6)
    assert same_bits(actual, expected)
    assert report.swapped_out_bytes + report.recomputed_bytes == 0
    assert report.margin_bytes < unmoved.margin_bytes
    assert report.highest_peak_bytes <= budget


@pytest.mark.usefixtures("unmoved_margin")
def test_a_step_that_fits_unchanged_is_not_swapped_from_the_first_on(unplanned):
    _, unmoved = unplanned
    budget = unmoved.predicted_peak_bytes + unmoved.margin_bytes - 2**20
    _, report = train(LARGE, budget=budget, policy="auto")
    assert report.swapped_out_bytes + report.recomputed_bytes == 0


@pytest.mark.parametrize("source", ["", " from cache"])
def test_the_part_of_the_margin_that_growth_does_not_need_is_used(source, unplanned):
    budget = tight_budget(unplanned[1], 0.85)
    for _ in range(2 if source else 1):
        actual, report = train(LARGE, budget=budget, policy="auto", num_steps=6)
    assert same_bits(actual, unplanned[0])
    (note,) = [note for note in report.plan_notes if "the margin can be smaller" in note]
    assert note.startswith(f"replanned after step 4{source}:")
    assert report.margin_bytes < unplanned[1].margin_bytes
    assert report.predicted_peak_bytes + report.margin_bytes <= budget
    assert report.highest_peak_bytes <= budget


def test_the_least_budget_with_known_growth_suffices_for_the_next_start(unplanned):
    torch.compiler.reset()
    model = lmswap.enable(LARGE.make(), tight_budget(unplanned[1], 0.8), min_swap_bytes=4096)
    for _ in range(6):
        model.zero_grad()
        LARGE.loss(model(LARGE.batch())).backward()
    least_bytes = lmswap.least_budget(model)
    lmswap.disable(model)
    assert same_bits(train(LARGE, budget=least_bytes, policy="auto", num_steps=6)[0], unplanned[0])


@pytest.mark.usefixtures("unmoved_margin")
def test_a_refusal_names_the_budget_of_an_unswapped_step_if_sufficient(unplanned):
    _, unmoved = unplanned
    step_bytes = unmoved.predicted_peak_bytes - unmoved.base_bytes - unmoved.reserve_bytes
    with pytest.raises(PlanInfeasible) as refused:
        train(LARGE, budget=unmoved.base_bytes + unmoved.reserve_bytes + 2**20, policy="swap", min_swap_bytes=2**40)
    assert refused.value.needed_bytes < unmoved.base_bytes + unmoved.reserve_bytes + step_bytes + unmoved.margin_bytes
    assert same_bits(train(LARGE, budget=refused.value.needed_bytes, policy="swap")[0], train(LARGE, policy="none")[0])
