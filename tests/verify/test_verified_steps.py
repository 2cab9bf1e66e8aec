"""Verified steps are those without verification, and all of their results are compared and counted."""

import gc
import weakref

import pytest
import torch

import lmswap
from lmswap.verify import against_eager
from lmswap.verify.against_unswapped import UnswappedReference
from tests.models import quick_of
from tests.rewrite.random_planner import plan_at_random
from tests.training import same_bits
from tests.verify.models import MODELS, enable, step

pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")


@pytest.mark.parametrize("name", quick_of(MODELS, ["encoder", "shared_views"]))
def test_verified_steps_have_the_same_bits_and_are_counted(name):
    case, runs = MODELS[name], []
    for verify in (False, True):
        model = enable(case, verify=verify)
        runs.append([value for _ in range(3) for value in step(case, model)] + [*model.state_dict().values()])
        report = lmswap.report(model)
        lmswap.disable(model)
    assert same_bits(*runs)
    verified = report.verified
    num_parameters = len({id(p) for p in model.parameters()})
    assert verified.num_gradients >= 3 * num_parameters
    assert verified.num_outputs >= 3
    assert verified.num_plain_outputs >= 3
    assert bool(verified.not_beside_plain) == (name == "shared_views")
    if name != "shared_views":  # its outputs are views of what the graph gives, whose gradients plain torch never has
        assert verified.num_plain_gradients >= 3 * num_parameters
    assert verified.num_transfers == verified.num_poisoned > 0
    assert verified.transferred_bytes == verified.poisoned_bytes > 0
    assert verified.num_differences == 0
    assert verified.unrepeatable == []
    assert f"{verified.num_gradients} gradients compared bitwise" in " ".join(str(report).split())
    assert "The budget is not kept while verifying." in str(report)


@pytest.mark.parametrize("name", quick_of(["encoder", "shared_views", "broken"], ["shared_views"]))
def test_plans_that_swap_and_recompute_pass(name, monkeypatch):
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(0))
    model = enable(MODELS[name])
    for _ in range(2):
        step(MODELS[name], model)
    assert lmswap.report(model).verified.num_gradients > 0
    lmswap.disable(model)


@pytest.mark.slow
def test_other_ways_to_use_a_model_are_verified_too():
    case = MODELS["encoder"]
    model = enable(case)
    losses = [case.loss(model(case.batch())) for _ in range(2)]
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    del losses  # the second one never runs backward
    with torch.no_grad():
        model.eval()(case.batch())
    case.loss(model(case.batch())).backward()
    assert lmswap.report(model).verified.num_differences == 0
    gc.collect()
    assert lmswap.report(model).tier_used_bytes == 0
    lmswap.disable(model)


def test_references_of_a_verified_call_end_with_its_graph(monkeypatch):
    made = []
    monkeypatch.setattr(
        "lmswap.session.compiled_graph.UnswappedReference",
        lambda *a, **k: made.append(UnswappedReference(*a, **k)) or made[-1],
    )
    runs = []

    class Run(against_eager._EagerRun):
        def __init__(self, *given):
            super().__init__(*given)
            runs.append(weakref.ref(self))

    monkeypatch.setattr(against_eager, "_EagerRun", Run)
    case = MODELS["shared_views"]
    model = enable(case)
    loss = case.loss(model(case.batch()))
    assert [len(reference._calls) for reference in made] == [1]
    del loss
    gc.collect()
    assert [len(reference._calls) for reference in made] == [0]
    step(case, model)
    assert [len(reference._calls) for reference in made] == [0]
    gc.collect()
    assert [run() for run in runs] == [None, None]
    lmswap.disable(model)
