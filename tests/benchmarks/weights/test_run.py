"""The whole comparison on a model whose weights are larger than what a process needs besides, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.weights import __main__ as main_module
from benchmarks.weights import run
from benchmarks.weights.__main__ import main
from benchmarks.weights.comparison import Choice
from benchmarks.weights.outcomes import Outcome, Steps
from benchmarks.weights.run import run_task
from tests.benchmarks.weights.outcomes import LMSWAP, PLAIN

CHOICE = Choice(["lmswap", "block swap"], "small", "cpu", 0.75, None, 0.5, Steps(2, 1, 3))


@pytest.mark.slow
def test_all_ways_have_plain_bits_within_the_budget(tmp_path):
    output = tmp_path / "weights.json"
    arguments = ["--tasks", "encoder3d-forward", "--size", "small", "--share", "0.75", "--copy-share", "0.9"]
    code = main(
        [*arguments, "--ways", "lmswap", "block swap", "--steady", "1", "--timed", "1", "--output", str(output)]
    )
    data = json.loads(output.read_text())
    plain, again, *others = data["tasks"]["encoder3d-forward"]
    assert code == 0, others
    assert [each["run"]["way"] for each in (plain, again, *others)] == ["plain", "plain", "lmswap", "block swap"]
    for outcome in others:
        assert outcome["status"] == "ran", outcome["detail"]
        assert outcome["peak_bytes"] <= outcome["run"]["budget_bytes"] < plain["peak_bytes"]
        assert outcome["read_bytes"] > 0
        assert outcome["bits"] == plain["bits"]
    assert "| encoder3d-forward | lmswap |" in output.with_suffix(".md").read_text()


@pytest.fixture
def trained(monkeypatch):
    """Returns what is run, which is not trained: a block less takes a MiB, and plain torch a GiB."""
    ran = []

    def run_in_turns(runs):
        ran.extend(runs)
        peaks = [2**30 - 2**20 * (each.num_blocks - 2 * (each.num_blocks > 0)) for each in runs]
        return [
            replace(PLAIN, run=each, peak_bytes=peak_bytes) if each.way != "lmswap" else replace(LMSWAP, run=each)
            for each, peak_bytes in zip(runs, peaks, strict=True)
        ]

    monkeypatch.setattr(run, "run_in_turns", run_in_turns)
    monkeypatch.setattr(run, "block_bytes", lambda run: [2**20] * 20)
    return ran


def test_limits_are_those_of_plain_torch(trained):
    choice = replace(CHOICE, share=0.99)
    outcomes = [*run_task(choice, "decoder", 32)]
    assert [outcome.run.way for outcome in outcomes] == ["plain", "plain", "lmswap", "block swap"]
    limited = outcomes[2].run
    assert limited.budget_bytes == int(0.99 * 2**30)
    assert limited.bytes_per_second == 2 * (2**30 - limited.budget_bytes) / (0.5 * 2.0)
    assert {outcome.run.steps for outcome in outcomes} == {choice.steps}
    assert {outcome.run.tokens for outcome in outcomes} == {32}


def test_the_fewest_blocks_that_fit_are_moved(trained):
    *_, moved = run_task(replace(CHOICE, share=0.99), "decoder")
    assert moved.run.num_blocks == 13  # 10.24 MiB less, and two slots
    *_, moved = run_task(replace(CHOICE, budget_bytes=2**30 - 2**22), "decoder")
    assert moved.run.num_blocks == 6


def test_a_budget_that_no_number_of_blocks_keeps_is_reported(trained):
    outcomes = [*run_task(CHOICE, "decoder")]
    (refused,) = (outcome for outcome in outcomes if outcome.run.way == "block swap")
    assert (refused.status, refused.detail) == ("infeasible", "with all 20 blocks moved the peak is 1006.00 MiB")


def test_on_a_gpu_ways_follow_each_other(trained):
    ways = [outcome.run.way for outcome in run_task(replace(CHOICE, device="cuda", copy_share=None), "decoder")]
    assert ways == ["plain", "plain", "lmswap", "block swap"]


def test_known_outcomes_are_kept_on_a_gpu(trained):
    choice = replace(CHOICE, device="cuda", copy_share=None)
    outcomes = [*run_task(choice, "decoder")]
    trained.clear()
    read = [Outcome.from_fields(json.loads(json.dumps(asdict(outcome)))) for outcome in outcomes]
    assert [*run_task(choice, "decoder", known=read[:3])] == outcomes
    assert {each.way for each in trained} == {"block swap"}


def test_without_plain_torch_nothing_is_run(monkeypatch):
    monkeypatch.setattr(run, "run_in_turns", lambda runs: [Outcome(each, "failed", "no room") for each in runs])
    (found,) = run_task(CHOICE, "decoder")
    assert (found.run.way, found.detail) == ("plain", "no room")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--share", "1.5"], "--share is between 0 and 1, not 1.5"),
        (["--copy-share", "0"], "--copy-share is between 0 and 1, not 0.0"),
        (["--timed", "0"], "--warm-up and --timed are at least 1"),
        (["--tokens", "0"], "--tokens are at least 1"),
        (["--budget", "much"], "much"),
        (["--ways", "fully_shard"], "fully_shard needs a GPU"),
        (["--output", "/nowhere/weights.json"], "results cannot be written to /nowhere/weights.json"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(main_module, "run_task", None)
    assert main(["--size", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_tasks_of_the_same_code_are_not_run_twice(tmp_path, monkeypatch):
    ran = []

    def run_task(choice, name, tokens, known):
        ran.append((name, tokens))
        yield from (PLAIN, PLAIN, LMSWAP)

    monkeypatch.setattr(main_module, "run_task", run_task)
    arguments = ["--size", "tiny", "--ways", "lmswap", "--resume", "--output", str(tmp_path / "weights.json")]
    for more in ((), (), ("--timed", "9")):
        assert main([*arguments, "--tasks", "decoder", "--tokens", "8", "16", *more]) == 0
    assert ran == 2 * [("decoder", 8), ("decoder", 16)]
