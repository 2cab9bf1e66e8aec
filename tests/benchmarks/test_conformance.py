"""Foreign models, modules and operators: some of torch's own for real, what each verdict means, the file and page."""

from __future__ import annotations

import hashlib
import importlib
import os
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from benchmarks.conformance import check as checking
from benchmarks.conformance import run
from benchmarks.conformance.__main__ import main
from benchmarks.conformance.check import PATHS, Comparison, Figures, Finding, check, check_all
from benchmarks.conformance.memory import counting_tensors
from benchmarks.conformance.results import Results, read_results
from benchmarks.conformance.run import Case, Outcome, cases, run_all, run_fresh
from benchmarks.conformance.table import render
from benchmarks.conformance.training import PLAIN, TRACED, train
from benchmarks.conformance.trial import Trial, groups, together
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.errors import CaptureError

MIB = 2**20
BEFORE, AFTER = Figures(60 * MIB, 60 * MIB, 1.0, 0, 0), Figures(30 * MIB, 33 * MIB, 1.5, 20 * MIB, 0)
FOUND = Finding("passed", "", "graph", 30 * MIB, BEFORE, AFTER, (), (Comparison("auto", AFTER, "", ""),))
PASSED = Outcome(Case("timm", "levit", "graphs"), 1, 1, 9.0, FOUND)
REFUSED = Outcome(Case("torch", "nn.Fold", "graphs"), 4, 3, 2.0, Finding("refused", "CaptureError: no graph"))
ORIGIN = {"device": "cpu", "cores": 2, "packages": {"torch": "2.13.0"}}
# Where plain torch is hard to follow: pieces of a storage that are written after others of it were saved, what an op
# writes once it is saved, random numbers, kernels that gradients of other strides lead to.
HARD = {
    "torch": ["nn.GRU", "nn.BatchNorm1d", "nn.InstanceNorm2d", "nn.MultiMarginLoss"],
    "operators": ["nn.functional.rrelu", "addr", "logsumexp"],
    "recurrent": [
        "LSTM, 1 layer, packed",
        "LSTM, 2 layers, both directions, projected, packed",
        "GRU, 1 layer, state carried on",
        "GRUCell",
        "LSTMCell, dropout",
        "RNN, 2 layers, dropout",
    ],
}
# Its cell writes pieces of a tensor in place, a trace of torch's makes tensors of them: sigmoid then rounds otherwise.
TRACED_OTHERWISE = {("GRUCell", "graphs")}
FEW = 2  # trials of a case, in the order of its file


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
        return x


def trial(make_model, batch=512, **options):
    return Trial(make_model, lambda: ((torch.randn(batch, 64),), {}), **options)


@pytest.fixture
def memory():
    with counting_tensors() as memory:
        yield memory


def sampled(case):
    return hashlib.sha256(case.model.encode()).digest()[0] < 1  # of 256: a few modules and operators


DRAWN = [case.model for case in cases(["operators"], paths=["hooks"]) if sampled(case)]
# Dynamo takes a second to trace what hooks serve as well, several for recurrent cells.
QUICKLY_TRACED = {"nn.BatchNorm1d", "nn.functional.rrelu", "logsumexp"}
CASES = [
    pytest.param(package, model, path, marks=[pytest.mark.slow] * (path == "graphs" and model not in QUICKLY_TRACED))
    for package, models in {**HARD, "drawn": [*DRAWN, "nn.functional.dropout", "transpose"]}.items()
    for model in models
    for path in PATHS
]


@pytest.mark.filterwarnings("ignore")  # Dynamo's, of what it cannot trace
@pytest.mark.parametrize(("package", "model", "path"), CASES)
def test_samples_of_torchs_own_tests_have_plain_bits(memory, package, model, path):
    zoo = importlib.import_module(run.PACKAGES["operators" if package == "drawn" else package])
    found = list(check_all(islice(zoo.trials(model), FEW), path, ["swap_all"], memory))
    right = {"passed", "unmoved", *({"tracing"} if (model, path) in TRACED_OTHERWISE else ())}
    assert [each.reason for each in found if each.verdict not in right] == []
    assert any(each.verdict != "unmoved" for each in found) or package == "drawn"


@pytest.mark.slow
def test_a_case_runs_in_a_process_of_its_own():
    (outcome,) = run_all(cases(["torch"], ["nn.Sigmoid"], ["hooks"]), at_once=1)
    assert (outcome.finding.verdict, outcome.passed) == ("passed", outcome.trials), outcome
    assert [comparison.policy for comparison in outcome.finding.comparisons] == [*run.POLICIES["torch"]["hooks"]]


def test_every_package_has_its_paths_and_policies():
    assert {*run.POLICIES} == {*run.PACKAGES} > {*run.BREADTH}
    assert all({*policies} == {*PATHS} and all(policies.values()) for policies in run.POLICIES.values())


def test_a_model_passes_in_half_of_its_memory(memory):
    found = check(trial(Deep), "graphs", ["auto"], memory)
    assert (found.verdict, found.path) == ("passed", "graph"), found
    assert found.step_bytes == found.before.predicted_bytes // 2
    assert found.after.predicted_bytes <= found.step_bytes
    assert found.after.measured_bytes <= 0.55 * found.before.measured_bytes
    assert found.after.swapped_bytes + found.after.recomputed_bytes > 0


def test_every_policy_is_compared_with_plain_torch_and_without_swapping(memory):
    found = check(trial(Deep, batch=16), "hooks", ["swap_all", "auto"], memory)
    assert (found.verdict, found.path) == ("passed", "hooks"), found
    assert [comparison.policy for comparison in found.comparisons] == ["swap_all", "auto"]
    assert not any(comparison.from_torch or comparison.from_unswapped for comparison in found.comparisons)
    assert found.comparisons[0].figures.swapped_bytes > 0


def test_if_half_the_memory_is_too_small_the_least_budget_is_used(memory):
    found = check(trial(lambda: nn.Linear(64, 64)), "graphs", ["auto"], memory)
    assert found.verdict in ("passed", "unmoved")
    assert found.before.predicted_bytes // 2 < found.step_bytes <= found.before.predicted_bytes


@pytest.mark.parametrize("path", PATHS)
def test_a_case_that_moves_no_byte_is_not_counted(memory, path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return x + self.weight

    assert check(trial(Sum), path, ["swap_all"], memory).verdict == "unmoved"


def changed(training, name="the loss"):
    return replace(training, bits=({**training.bits[0], name: "?"}, *training.bits[1:]))


def tampered(monkeypatch, is_wrong, change=changed):
    real = checking.train

    def wrong(trial, way, memory, kept_step=None):
        training = real(trial, way, memory, kept_step)
        return change(training) if is_wrong(way) else training

    monkeypatch.setattr(checking, "train", wrong)


def test_other_bits_fail(memory, monkeypatch):
    tampered(monkeypatch, lambda way: way.policy not in (None, "none"))
    found = check(trial(Deep), "graphs", ["auto"], memory)
    reason = "auto, step 1: other bits in the loss than in plain torch, and by auto than without swapping"
    assert (found.verdict, found.reason) == ("failed", reason)
    (comparison,) = found.comparisons
    assert comparison.from_torch == comparison.from_unswapped == "step 1: other bits in the loss"
    assert found.unswapped_from_torch == ""


@pytest.mark.parametrize("path", PATHS)
def test_failures_with_and_without_swapping_are_failures(memory, monkeypatch, path):
    tampered(monkeypatch, lambda way: way.policy is not None)
    found = check(trial(Deep), path, ["swap_all"], memory)
    reason = "without swapping, step 1: other bits in the loss than in plain torch"
    assert (found.verdict, found.reason) == ("failed", reason)
    assert (found.comparisons[0].from_torch, found.comparisons[0].from_unswapped) == (found.unswapped_from_torch, "")


def test_differences_of_torchs_tracing_are_distinguished_from_lmswaps(memory, monkeypatch):
    tampered(monkeypatch, lambda way: way != PLAIN)
    assert check(trial(Deep), "graphs", ["swap_all"], memory).verdict == "tracing"
    assert check(trial(Deep), "hooks", ["swap_all"], memory).verdict == "failed"


@pytest.mark.parametrize(
    ("off", "verdict", "by"), [(1e-6, "tracing", "1e-06"), (1e-2, "failed", "1e-02"), (torch.nan, "failed", "inf")]
)
def test_notes_of_the_report_explain_rounding_differences_only(memory, monkeypatch, off, verdict, by):
    def said(training):
        reported = replace(training.report, notes=(f"{ROUNDED_OTHERWISE}: as made up",))
        kept = {name: (1 + off) * result for name, result in training.kept.items() if result.is_floating_point()}
        kept = training.kept | kept
        return changed(replace(training, report=reported, kept=kept))

    tampered(monkeypatch, lambda way: way.policy is not None, said)
    found = check(trial(Deep), "hooks", ["swap_all"], memory)  # also where hooks took over from graphs
    assert found.verdict == verdict, found
    assert found.reason.endswith(f", by {by} of the largest number at most")


def test_another_layout_is_distinguished_from_other_bits(memory, monkeypatch):
    def transposed(training):
        return replace(training, layouts=({**training.layouts[0], "output 0": "[1, 64]"}, *training.layouts[1:]))

    tampered(monkeypatch, lambda way: way.policy is not None, transposed)
    found = check(trial(Deep), "graphs", ["swap_all"], memory)
    assert (found.verdict, found.reason) == (
        "layout",
        "without swapping, step 1: other strides in output 0 than in plain torch",
    )


def test_torchs_own_tracing_has_plain_bits_where_it_changes_no_op(memory):
    assert train(trial(Deep), TRACED, memory).bits == train(trial(Deep), PLAIN, memory).bits


@pytest.mark.slow
def test_trials_of_a_group_that_fails_are_checked_separately(memory, monkeypatch):
    trials = [trial(Deep, batch, name=str(batch), group="all") for batch in (8, 16, 24)]
    (found,) = check_all(iter(trials), "hooks", ["swap_all"], memory)
    assert (found.verdict, found.trials) == ("passed", 3)

    real = checking.train

    def wrong(trial, way, memory, kept_step=None):
        training = real(trial, way, memory, kept_step)
        return changed(training) if way.policy == "swap_all" and "16" in trial.name else training

    monkeypatch.setattr(checking, "train", wrong)
    found = list(check_all(iter(trials), "hooks", ["swap_all"], memory))
    assert [(each.verdict, each.reason[:3]) for each in found] == [("passed", ""), ("failed", "16:"), ("passed", "")]


def test_failures_of_a_combination_only_are_kept(memory, monkeypatch):
    tampered(monkeypatch, lambda way: way.policy == "swap_all")
    monkeypatch.setattr(checking, "check", lambda trial, path, policies, memory: FOUND)
    trials = [trial(Deep, batch, name=str(batch), group="all") for batch in (8, 16)]
    found = list(check_all(iter(trials), "hooks", ["swap_all"], memory))
    assert [each.verdict for each in found] == ["passed", "passed", "failed"]
    assert found[-1].reason.startswith("8, 16: swap_all, step 1: ")


def test_only_neighbours_of_one_group_train_together():
    trials = [trial(Deep, name=name, group=group) for name, group in (("a", "x"), ("b", "x"), ("c", ""), ("d", ""))]
    assert [[each.name for each in group] for group in groups(iter(trials))] == [["a", "b"], ["c"], ["d"]]
    model, (calls, _) = (part() for part in (together(trials[:2]).make_model, together(trials[:2]).make_call))
    assert len(model(*calls)) == 2


def test_the_worst_sample_represents_its_case_except_inconclusive_ones():
    found = [FOUND, Finding("torch", "no gradient"), Finding("unmoved"), replace(FOUND, trials=3)]
    outcome = run._outcome(PASSED.case, found, 1.0)
    assert (outcome.finding.verdict, outcome.trials, outcome.passed) == ("passed", 6, 4)
    assert run._outcome(PASSED.case, [*found, Finding("tracing"), Finding("failed")], 1.0).finding.verdict == "failed"
    assert run._outcome(PASSED.case, [Finding("unmoved"), Finding("torch")], 1.0).passed == 0


def test_a_model_that_torch_does_not_repeat_is_not_ours(memory):
    calls = iter(range(1000))

    class Counting(Deep):
        def forward(self, x):
            return super().forward(x) * self.count

    def make_model():
        model = Counting()
        model.register_buffer("count", torch.tensor(float(next(calls))))
        return model

    found = check(trial(make_model), "graphs", ["auto"], memory)
    assert found.verdict == "torch"
    assert found.reason.startswith("two runs in torch alone differ: step 1: other bits in ")


def test_refusals_of_lmswap_are_distinguished_from_errors_of_torch(memory, monkeypatch):
    class Broken(Deep):
        def forward(self, x):
            raise ValueError("no such layer")

    def checked(make_model):
        return check(trial(make_model), "graphs", ["auto"], memory)

    assert checked(Broken).reason == "does not train in torch alone: ValueError: no such layer"
    assert checked(lambda: Deep().requires_grad_(False)).verdict == "torch"

    real = checking.train

    def refuse(trial, way, memory, kept_step=None):
        if way.policy == "auto":
            raise CaptureError("no graph")
        return real(trial, way, memory, kept_step)

    monkeypatch.setattr(checking, "train", refuse)
    assert checked(Deep) == Finding("refused", "auto: CaptureError: no graph")


def test_a_model_that_cannot_be_made_fails(memory):
    found = check(trial(lambda: nn.Linear(-1, 2)), "graphs", ["auto"], memory)
    assert found.verdict == "failed" and found.reason.startswith("cannot be made: RuntimeError: ")


def test_weights_stay_finite_whatever_a_gradient_is(memory):
    class Root(Deep):
        def forward(self, x):
            return super().forward(x).sub(1e9).sqrt()

    assert check(trial(Root, batch=8), "hooks", ["swap_all"], memory).verdict == "passed"


def die(case, sender):
    os._exit(3)


def hang(case, sender):
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "limit", "reason"), [(die, 500, "its process ended with 3"), (hang, 1, "took more than 1 seconds")]
)
def test_a_process_that_dies_or_hangs_is_an_outcome(monkeypatch, way, limit, reason):
    monkeypatch.setattr(run, "_run", way)
    monkeypatch.setattr(run, "LIMIT_SECONDS", limit)
    found = run_fresh(REFUSED.case)
    assert (found.finding, found.passed) == (Finding("failed", reason), 0)


def test_stored_outcomes_of_other_cases_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.conformance.__main__._version", lambda package: "1" if package == "torch" else None)
    monkeypatch.setattr(
        "benchmarks.conformance.__main__.run_all",
        lambda chosen, at_once: [replace(PASSED, case=case) for case in chosen],
    )
    path = tmp_path / "conformance_cpu.json"
    known = [Case("torch", name, way) for name in ("nn.Linear", "nn.GLU") for way in PATHS]
    Results(ORIGIN, tuple(replace(REFUSED, case=case) for case in known)).write(path)
    assert main(["--models", "nn.GLU", "--paths", "hooks", "--output", str(tmp_path)]) == 0
    verdicts = {(o.case.model, o.case.path): o.finding.verdict for o in read_results(path).outcomes}
    assert verdicts.pop(("nn.GLU", "hooks")) == "passed"
    assert len(verdicts) == 3 and {*verdicts.values()} == {"refused"}
    assert "torch **nn.GLU**, graphs" in (tmp_path / "conformance_cpu.md").read_text()


def test_failures_are_the_exit_status(tmp_path, monkeypatch):
    failed = replace(REFUSED, finding=Finding("failed", "other bits"))
    monkeypatch.setattr("benchmarks.conformance.__main__.run_all", lambda chosen, at_once: [failed])
    assert main(["--packages", "torch", "--models", "nn.GLU", "--output", str(tmp_path)]) == 1
    assert main(["--packages", "torch", "--models", "nn.Unknown", "--output", str(tmp_path)]) == 2


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "results.json"
    results = Results(ORIGIN, (PASSED, REFUSED))
    results.write(path)
    assert read_results(path) == results
    path.write_text(path.read_text().replace("conformance/2", "conformance/1"))
    with pytest.raises(ValueError, match=r"is of schema 'lmswap.conformance/1'.*run all packages"):
        read_results(path)


def test_the_page_counts_and_names_failures():
    page = render(Results(ORIGIN, (PASSED, REFUSED)))
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert "| timm | graphs | 1 | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 of 1 | 1 of 1 |" in rows
    assert "| **all** | graphs | 2 | 5 | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 1 of 1 | 1 of 1 |" in rows
    assert "| timm | 50% | 10.0% | 10.0% |" in rows
    assert "- torch **nn.Fold**, graphs (3 of 4 samples passed): CaptureError: no graph" in page
    figures = "60.00 MiB | 30.00 MiB | 50% | +10.0% | 20.00 MiB |  | 1.00 s → 1.50 s |"
    assert f"| timm levit, graphs | passed | graph | {figures}" in rows
