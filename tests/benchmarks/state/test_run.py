"""Limits follow plain torch, and what cannot be used is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.state import __main__ as main_module
from benchmarks.state import run
from benchmarks.state.__main__ import main
from benchmarks.state.run import copied_bytes, run_task
from benchmarks.state.training import StateOutcome
from benchmarks.weights.comparison import Choice
from benchmarks.weights.outcomes import Steps
from tests.benchmarks.state.outcomes import LMSWAP, PLAIN

CHOICE = Choice(["lmswap", "moved state"], "tiny", "cpu", 0.75, None, 0.5, Steps(2, 1, 3))


@pytest.mark.slow
def test_all_ways_have_plain_bits_within_the_budget(tmp_path, capsys):
    output = tmp_path / "state.json"
    arguments = ["--tasks", "gpt", "--size", "small", "--share", "0.85", "--steady", "1", "--timed", "1"]
    main([*arguments, "--output", str(output)])
    plain, again, *others = json.loads(output.read_text())["tasks"]["gpt"]
    assert [each["run"]["way"] for each in (plain, again, *others)] == ["plain", "plain", "lmswap", "moved state"]
    for outcome in others:
        assert outcome["status"] == "ran", outcome["detail"]
        # Pages of host copies that saving reads in place count until the next step, which the goals show.
        peaks = [peak_bytes for phase, peak_bytes in outcome["peaks"].items() if phase != "save"]
        assert max(peaks) <= outcome["run"]["budget_bytes"] < plain["peak_bytes"]
        assert outcome["read_bytes"] > 0
        assert (outcome["bits"], outcome["trained"]) == (plain["bits"], plain["trained"])
    assert "| gpt | lmswap |" in output.with_suffix(".md").read_text()
    assert "torchao needs a GPU" in capsys.readouterr().out


def test_limits_are_those_of_plain_torch(monkeypatch):
    def run_in_turns(runs):
        peaks = [2**30 - 2**24 * each.num_blocks for each in runs]
        return [replace(PLAIN, run=each, peak_bytes=peak) for each, peak in zip(runs, peaks, strict=True)]

    monkeypatch.setattr(run, "run_in_turns", run_in_turns)
    monkeypatch.setattr(run, "part_bytes", lambda run: [2**24] * 20)
    outcomes = [*run_task(CHOICE, "gpt")]
    assert [outcome.run.way for outcome in outcomes] == ["plain", "plain", "lmswap", "moved state"]
    assert {outcome.run.budget_bytes for outcome in outcomes[2:]} == {3 * 2**28}
    assert {outcome.run.bytes_per_second for outcome in outcomes[2:]} == {2**28 / (0.5 * 2.0)}
    assert outcomes[3].run.num_blocks == 16


def test_state_is_copied_once_and_the_rest_in_each_pass():
    assert copied_bytes(PLAIN, 2**27) == 2**27
    assert copied_bytes(PLAIN, 2**28 + 10) == 2**28 + 4 * 10  # two micro-batches


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--share", "1.5"], "--share is between 0 and 1, not 1.5"),
        (["--budget", "1GiB", "much"], "much"),
        (["--ways", "torchao"], "torchao needs a GPU"),
        (["--size", "vit-g", "--tasks", "gpt", "vit"], "--size vit-g is none of gpt"),
        (["--output", "/nowhere/state.json"], "results cannot be written to /nowhere/state.json"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(main_module, "run_task", None)
    assert main(["--size", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_tasks_of_the_same_code_are_not_run_twice(tmp_path, monkeypatch):
    ran = []

    def run_task(choice, name, known):
        ran.append((name, choice.budget_bytes))
        yield from (PLAIN, PLAIN, LMSWAP)

    monkeypatch.setattr(main_module, "run_task", run_task)
    arguments = ["--size", "tiny", "--ways", "lmswap", "--resume", "--output", str(tmp_path / "state.json")]
    for _ in range(2):
        assert main([*arguments, "--tasks", "gpt", "--budget", "1MiB", "2MiB"]) == 0
    assert ran == [("gpt", 2**20), ("gpt", 2**21)]
    data = json.loads((tmp_path / "state.json").read_text())
    assert StateOutcome.from_fields(data["tasks"]["gpt, 2MiB"][2]) == LMSWAP


def test_a_peak_over_the_budget_in_any_phase_is_a_failure(tmp_path, monkeypatch):
    exceeding = replace(LMSWAP, peaks={**LMSWAP.peaks, "load": 2**30})
    monkeypatch.setattr(main_module, "run_task", lambda *_: iter((PLAIN, PLAIN, exceeding)))
    arguments = ["--size", "tiny", "--tasks", "gpt", "--output", str(tmp_path / "state.json")]
    assert main([*arguments, "--ways", "lmswap"]) == 1
