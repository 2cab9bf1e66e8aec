"""Foreign models: some of torch's own modules for real, what each verdict means, and the file and page of results."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.conformance import check as checking
from benchmarks.conformance import run
from benchmarks.conformance.__main__ import main
from benchmarks.conformance.check import Figures, Finding, check
from benchmarks.conformance.memory import counting_tensors
from benchmarks.conformance.results import Results, read_results
from benchmarks.conformance.run import Case, Outcome, cases, run_all, run_fresh
from benchmarks.conformance.table import render
from benchmarks.conformance.trial import Trial
from lmswap.errors import CaptureError

MIB = 2**20
FOUND = Finding(
    "passed",
    "",
    "graph",
    30 * MIB,
    Figures(60 * MIB, 60 * MIB, 1.0, 0, 0),
    Figures(30 * MIB, 33 * MIB, 1.5, 20 * MIB, 0),
)
PASSED = Outcome(Case("timm", "levit"), 1, 1, 9.0, FOUND)
REFUSED = Outcome(Case("torch", "nn.Fold"), 4, 3, 2.0, Finding("refused", "CaptureError: no graph"))
ORIGIN = {"device": "cpu", "cores": 2, "packages": {"torch": "2.13.0"}}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
        return x


def trial(make_model, batch=512):
    return Trial(make_model, lambda: ((torch.randn(batch, 64),), {}))


@pytest.fixture
def memory():
    with counting_tensors() as memory:
        yield memory


def sampled(case):
    return hashlib.sha256(case.model.encode()).digest()[0] < 6  # of 256: a few modules


def test_modules_of_torch_pass():
    chosen = [case for case in cases(["torch"]) if sampled(case)]
    assert len(chosen) > 2
    for outcome in run_all(chosen, at_once=2):
        assert outcome.finding.verdict == "passed", outcome
        assert outcome.passed == outcome.trials > 0


def test_a_model_passes_in_half_of_its_memory(memory):
    found = check(trial(Deep), memory)
    assert (found.verdict, found.path) == ("passed", "graph"), found
    assert found.step_bytes == found.before.predicted_bytes // 2
    assert found.after.predicted_bytes <= found.step_bytes
    assert found.after.measured_bytes <= 0.55 * found.before.measured_bytes
    assert found.after.swapped_bytes + found.after.recomputed_bytes > 0


def test_where_half_is_too_little_the_least_is_given(memory):
    found = check(trial(lambda: nn.Linear(64, 64)), memory)
    assert found.verdict == "passed"
    assert found.before.predicted_bytes // 2 < found.step_bytes <= found.before.predicted_bytes


def test_other_bits_fail(memory, monkeypatch):
    real = checking.train

    def wrong(trial, way, memory):
        training = real(trial, way, memory)
        return (
            training
            if way.policy == "none"
            else replace(training, bits=({**training.bits[0], "the loss": "?"}, *training.bits[1:]))
        )

    monkeypatch.setattr(checking, "train", wrong)
    found = check(trial(Deep), memory)
    assert (found.verdict, found.reason) == ("failed", "under its budget, step 1: other bits in the loss")


def test_a_model_that_torch_does_not_repeat_is_not_ours(memory):
    calls = iter(range(1000))

    class Counting(Deep):
        def forward(self, x):
            return super().forward(x) * self.count

    def make_model():
        model = Counting()
        model.register_buffer("count", torch.tensor(float(next(calls))))
        return model

    found = check(trial(make_model), memory)
    assert found.verdict == "torch"
    assert found.reason.startswith("two runs without swapping differ too: under its budget, step 1: other bits in ")


def test_what_lmswap_refuses_is_told_from_what_torch_cannot(memory, monkeypatch):
    class Broken(Deep):
        def forward(self, x):
            raise ValueError("no such layer")

    assert check(trial(Broken), memory).reason == "does not train in torch alone: ValueError: no such layer"
    assert check(trial(lambda: Deep().requires_grad_(False)), memory).verdict == "torch"

    real = checking.train

    def refuse(trial, way, memory):
        if way.policy is not None:
            raise CaptureError("no graph")
        return real(trial, way, memory)

    monkeypatch.setattr(checking, "train", refuse)
    assert check(trial(Deep), memory) == Finding("refused", "CaptureError: no graph")


def test_a_model_that_cannot_be_made_fails(memory):
    found = check(trial(lambda: nn.Linear(-1, 2)), memory)
    assert found.verdict == "failed" and found.reason.startswith("cannot be made: RuntimeError: ")


def die(case, sender):
    os._exit(3)


def hang(case, sender):
    while True:
        pass


@pytest.mark.parametrize(
    ("way", "limit", "reason"), [(die, 500, "its process ended with 3"), (hang, 1, "took more than 1 seconds")]
)
def test_a_process_that_dies_or_hangs_is_an_outcome(monkeypatch, way, limit, reason):
    monkeypatch.setattr(run, "_run", way)
    monkeypatch.setattr(run, "LIMIT_SECONDS", limit)
    found = run_fresh(REFUSED.case)
    assert (found.finding, found.passed) == (Finding("failed", reason), 0)


def test_stored_outcomes_stay_where_others_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.conformance.__main__._version", lambda package: "1" if package == "torch" else None)
    monkeypatch.setattr(
        "benchmarks.conformance.__main__.run_all",
        lambda chosen, at_once: [replace(PASSED, case=case) for case in chosen],
    )
    path = tmp_path / "conformance_cpu.json"
    Results(
        ORIGIN, (replace(REFUSED, case=Case("torch", "nn.Linear")), replace(REFUSED, case=Case("torch", "nn.GLU")))
    ).write(path)
    assert main(["--models", "nn.GLU", "--output", str(tmp_path)]) == 0
    verdicts = {o.case.model: o.finding.verdict for o in read_results(path).outcomes}
    assert verdicts == {"nn.Linear": "refused", "nn.GLU": "passed"}
    assert "torch nn.GLU" in (tmp_path / "conformance_cpu.md").read_text()


def test_failures_are_the_exit_status(tmp_path, monkeypatch):
    failed = replace(REFUSED, finding=Finding("failed", "other bits"))
    monkeypatch.setattr("benchmarks.conformance.__main__.run_all", lambda chosen, at_once: [failed])
    assert main(["--packages", "torch", "--models", "nn.GLU", "--output", str(tmp_path)]) == 1
    assert main(["--packages", "torch", "--models", "nn.Unknown", "--output", str(tmp_path)]) == 2


def test_results_are_read_as_they_were_written(tmp_path):
    results = Results(ORIGIN, (PASSED, REFUSED))
    results.write(tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == results


def test_the_page_counts_and_says_what_did_not_pass():
    page = render(Results(ORIGIN, (PASSED, REFUSED)))
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert "| timm | 1 | 1 | 0 | 0 | 0 | 50% | 10.0% | 10.0% |" in rows
    assert "| **all** | 2 | 1 | 0 | 1 | 0 | 50% | 10.0% | 10.0% |" in rows
    assert "- torch **nn.Fold**, refused (3 of 4 samples passed): CaptureError: no graph" in page
    levit = "| timm levit | passed | graph | 60.00 MiB | 30.00 MiB | 50% | +10.0% | 20.00 MiB |  | 1.00 s → 1.50 s |"
    assert levit in rows
