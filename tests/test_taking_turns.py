"""Steps of several kinds that take turns: each learns from its own last step, whatever ran between."""

from __future__ import annotations

import pytest
import torch

import lmswap
from lmswap.plan import feedback
from tests.models import CASES, Broken, Case

BROKEN = Case(Broken, lambda: torch.randn(64, 128))


def validate(model: torch.nn.Module, case: Case) -> None:
    model.eval()
    with torch.no_grad():
        model(case.batch())
    model.train()


def train_on_half(model: torch.nn.Module, case: Case) -> None:
    batch = case.batch()
    case.loss(model(batch[: len(batch) // 2])).backward()


def train(model: torch.nn.Module, case: Case, between) -> list[torch.Tensor]:
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
    """Results without and with lmswap, and what is planned of the last step."""
    torch.manual_seed(0)
    expected = train(case.make(), case, between)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = lmswap.enable(case.make(), "4GiB", min_swap_bytes=4096, policy="swap_all", **options)
    actual = train(model, case, between)
    report, step = lmswap.report(model), lmswap.api._sessions[model].current_step()
    lmswap.disable(model)
    assert any(row.decision == "swap" for row in report.decisions)
    return expected, actual, step


@pytest.mark.parametrize("compiler", ["fx", "eager"])
@pytest.mark.parametrize("between", [validate, train_on_half])
def test_a_prediction_that_is_off_is_made_again_though_another_step_runs_between(between, compiler, monkeypatch):
    monkeypatch.setattr(feedback, "TOLERANCE", -1.0)
    expected, actual, step = trained(CASES["resnet"], between, compiler=compiler)
    assert all(map(torch.equal, actual, expected))
    assert step.origin.startswith("made again after step ")


@pytest.mark.parametrize("between", [validate, train_on_half])
def test_graphs_that_run_as_one_step_are_planned_as_one_though_another_step_runs_between(between):
    expected, actual, step = trained(BROKEN, between)
    assert all(map(torch.equal, actual, expected))
    assert len(step.graphs) == 3
