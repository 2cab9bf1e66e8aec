"""Comparison with eager mode: results that differ from plain torch are errors, documented rounding is not."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.capture.numerics.tangents import TangentAdapter
from lmswap.errors import PlainTorchDiffers
from lmswap.verify import against_eager
from tests.models import Case
from tests.verify.models import SMALL, enable, step

pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")


class Drops(nn.Module):
    def __init__(self, p: float = 0.15):
        super().__init__()
        self.first, self.second, self.p = nn.Linear(128, 128), nn.Linear(128, 128), p

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x).tanh(), self.p))


DROPS = Case(Drops, lambda: torch.randn(64, 128))


@pytest.mark.cpu_only("on a GPU eager torch runs the dropout that it traces")
def test_a_trace_unlike_plain_torch_is_detected(monkeypatch):
    monkeypatch.setattr("lmswap.capture.aot.no_python_kernels", nullcontext)  # torch then traces another dropout
    model = enable(DROPS, verify=False)
    step(DROPS, model)  # no error
    lmswap.disable(model)
    model = enable(DROPS)
    with pytest.raises(
        PlainTorchDiffers, match=r"output 0 is another one than plain torch gives: .* without, .* with lmswap"
    ):
        step(DROPS, model)
    lmswap.disable(model)


def twice(given):
    """Gradients of one part of a backward, doubled."""
    return {position: made if made is None else made * 2 for position, made in given.items()}


def test_gradients_that_differ_from_plain_torch_are_detected(monkeypatch):
    run = TangentAdapter.run
    monkeypatch.setattr(TangentAdapter, "run", lambda *given: map(twice, run(*given)))
    model = enable(DROPS)
    with pytest.raises(PlainTorchDiffers, match=r"the gradient of (first|second)\.(weight|bias) is another one"):
        step(DROPS, model)
    lmswap.disable(model)


class Scans(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x):
        return self.layer(x).sigmoid().cumprod(1)


def test_documented_rounding_differences_are_named_and_no_error(monkeypatch):
    run = TangentAdapter.run
    monkeypatch.setattr(TangentAdapter, "run", lambda *given: map(twice, run(*given)))
    case = Case(Scans, lambda: torch.rand(64, 128))
    model = enable(case)
    step(case, model)
    report = lmswap.report(model)
    assert any(note.startswith(ROUNDED_OTHERWISE) for note in report.notes)
    assert {"the gradient of layer.weight", "the gradient of layer.bias"} <= {*report.verified.rounded_otherwise}
    assert "rounded differently from plain torch, see the notes: the gradient of" in str(report.verified)
    lmswap.disable(model)


class Writes(nn.Module):
    """Writes its argument, a buffer and what was computed before it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128)
        self.register_buffer("total", torch.zeros(128))

    def forward(self, x, seen):
        seen.add_(1)
        self.total += x.detach().sum(0)
        x.mul_(2)
        return self.layer(x.tanh())


def test_writes_of_a_region_are_compared_with_plain_torch(monkeypatch):
    compared, compare = set(), against_eager.EagerReference._compare
    monkeypatch.setattr(
        against_eager.EagerReference,
        "_compare",
        lambda self, results, *rest: compared.update(r.name for r in results) or compare(self, results, *rest),
    )
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(Writes(), policy="swap_all", min_swap_bytes=SMALL, verify=True)
    before = nn.Linear(128, 128)
    for _ in range(2):
        x, seen = before(torch.randn(64, 128)), torch.zeros(3)
        model(x, seen).square().sum().backward()
        assert torch.equal(seen, torch.ones(3))
    verified = lmswap.report(model).verified
    assert (verified.num_differences, verified.unrepeatable) == (0, [])
    written = {f"input {name} (written in place)" for name in ("x", "seen", "total")}
    assert {*written, "output 0", "the gradient of x", "the gradient of layer.weight"} <= compared
    lmswap.disable(model)
