"""Steps of several kinds that take turns: each learns from its own last step, whatever ran between."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import PlanInfeasible
from lmswap.planner import calibrate
from lmswap.reporting.replan_reasons import AccumulatedGradients
from lmswap.session.planner import Planner
from tests.models import CASES, Broken, Case, quick_of

ADDS_UP = str(AccumulatedGradients())
BROKEN = Case(Broken, lambda: torch.randn(64, 128))


def validate(model: nn.Module, case: Case) -> None:
    model.eval()
    with torch.no_grad():
        model(case.batch())
    model.train()


def train_on_half(model: nn.Module, case: Case) -> None:
    batch = case.batch()
    case.loss(model(batch[: len(batch) // 2])).backward()


def train(model: nn.Module, case: Case, between) -> list[torch.Tensor]:
    torch.manual_seed(0)
    results = []
    for _ in range(6):
        between(model, case)
        model.zero_grad()
        loss = case.loss(model(case.batch()))
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return results


def trained(case: Case, between, **options):
    """Results without and with lmswap, what is planned of the last step, and what became of plans."""
    torch.manual_seed(0)
    expected = train(case.make(), case, between)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = lmswap.enable(case.make(), "4GiB", min_swap_bytes=4096, policy="swap_all", **options)
    actual = train(model, case, between)
    report, step = lmswap.report(model), lmswap.api._sessions[model].current_step()
    lmswap.disable(model)
    assert any(row.decision == "swap" for row in report.decisions)
    return expected, actual, step, report.plan_notes


@pytest.mark.parametrize(
    ("between", "compiler"),
    quick_of(
        itertools.product([validate, train_on_half], ["fx", "eager"]), [(validate, "eager"), (train_on_half, "fx")]
    ),
)
def test_a_wrong_prediction_is_replanned_despite_another_step_between(between, compiler, monkeypatch):
    monkeypatch.setattr(calibrate, "TOLERANCE", -1.0)
    expected, actual, step, notes = trained(CASES["resnet"], between, compiler=compiler)
    assert all(map(torch.equal, actual, expected))
    assert step.origin.startswith("replanned after step ")
    num_trained = 1 if between is validate else 2  # nothing is planned for a step without a backward
    made_again = [note for note in notes if note.startswith("replanned ") and ADDS_UP not in note]
    assert len(made_again) == num_trained


@pytest.mark.parametrize("between", [validate, train_on_half])
def test_graphs_of_one_step_are_planned_together_despite_another_step(between):
    expected, actual, step, _ = trained(BROKEN, between)
    assert all(map(torch.equal, actual, expected))
    assert len(step.graphs) == 3


class TwoEnds(nn.Module):
    """Two graphs that share nothing but their input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x):
        a = torch.tanh(self.a(x)).exp()
        torch._dynamo.graph_break()
        return a, torch.tanh(self.b(x)).exp()


@pytest.mark.parametrize("policy", ["swap_all", "auto"])
def test_an_order_that_no_plan_serves_is_tried_once(policy, monkeypatch):
    torch.compiler.reset()
    model = lmswap.enable(TwoEnds(), "4GiB", min_swap_bytes=4096, policy=policy)
    data = torch.randn(64, 128)

    def step(order) -> None:
        outputs = model(data)
        for which in order:
            outputs[which].sum().backward()

    for _ in range(3):
        step((1, 0))
    tried = []

    def search(_, request):
        if request.policy == policy:  # not to advise another
            tried.append(request)
        raise PlanInfeasible(budget_bytes=1, needed_bytes=2, where="nowhere")

    monkeypatch.setattr(Planner, "search", search)
    for _ in range(5):
        step((0, 1))
    assert len(tried) == 1
    notes = lmswap.report(model).plan_notes
    assert any("the plan stays as it was though graphs ran backward in another order" in note for note in notes)
    lmswap.disable(model)
