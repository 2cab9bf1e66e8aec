"""The judge of budgets: what it draws, and what it says of a run."""

import json
import sys
from itertools import count

import pytest
import torch

from benchmarks.judge import __main__ as judge
from benchmarks.judge.networks import NAMED, network_called

MIB = 2**20
PLAIN = {"digest": "d", "grown_bytes": 100 * MIB}
KEPT = {
    "digest": "d",
    "budget_bytes": 100 * MIB,
    "grown_bytes": 96 * MIB,
    "highest_peak_bytes": 95 * MIB,
    "measured_peak_bytes": 94 * MIB,
    "predicted_peak_bytes": 94 * MIB,
    "measured_seconds": 1.0,
    "predicted_seconds": 1.05,
    "swapped_out_bytes": MIB,
    "recomputed_bytes": 0,
}


@pytest.mark.parametrize("name", [*map(str, range(6)), *NAMED])
def test_a_network_trains_and_is_the_same_each_time(name):
    if name == "monai_unet":
        pytest.importorskip("monai")
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        network = network_called(name)
        model = network.make().train(mode=False)
        loss = model(network.batch()[:1]).square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        losses.append(loss.detach())
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("changed", "broken", "missed"),
    [
        ({}, (), ()),
        ({"refused": "it does not fit"}, ("refused: it does not fit",), ()),
        ({"digest": "e"}, ("other bits than plain torch",), ()),
        ({"highest_peak_bytes": 101 * MIB}, ("held 101.00 MiB",), ()),
        ({"grown_bytes": 102 * MIB}, ("held 102.00 MiB",), ()),  # whatever the report says
        ({"measured_peak_bytes": 91 * MIB, "predicted_peak_bytes": 91 * MIB}, ("used 91.0%",), ()),
        (
            {"measured_peak_bytes": 50 * MIB, "predicted_peak_bytes": 50 * MIB, "swapped_out_bytes": 0},
            (),
            (),
        ),  # it fits
        ({"predicted_peak_bytes": 90 * MIB}, ("peak predicted -4.3%",), ()),
        ({"predicted_seconds": 1.1}, (), ("seconds predicted +10.0%",)),
    ],
)
def test_a_run_is_held_against_promises_and_goals(changed, broken, missed, monkeypatch):
    monkeypatch.setattr(judge, "_run", lambda *_: KEPT | changed)
    monkeypatch.setattr(judge.os, "getloadavg", lambda: (1.0, 5.0, 5.0))
    verdict = judge.judge("0", 100 * MIB, PLAIN)
    assert (verdict.broken, verdict.missed) == (broken, missed)


def test_seconds_are_not_judged_on_a_machine_that_others_use(monkeypatch):
    monkeypatch.setattr(judge, "_run", lambda *_: KEPT | {"predicted_seconds": 2.0})
    monkeypatch.setattr(judge.os, "getloadavg", lambda: (3.0, 1.0, 1.0))
    verdict = judge.judge("0", 100 * MIB, PLAIN)
    assert (verdict.missed, verdict.figures["load"]) == ((), 3.0)


@pytest.mark.parametrize(
    ("code", "wrong"), [("import time; time.sleep(60)", "did not end within 1 s"), ("exit(3)", "exit code 3")]
)
def test_a_run_that_hangs_or_crashes_breaks_a_promise(code, wrong, monkeypatch):
    monkeypatch.setattr(judge, "COMMAND", [sys.executable, "-c", code])
    monkeypatch.setattr(judge, "_MAX_SECONDS", 1)
    (broken,) = judge.judge("0", "50%", PLAIN).broken
    assert wrong in broken


@pytest.fixture
def runs(monkeypatch):
    """Budgets that runs were given, whose figures are made up."""
    given = []

    def run(_name, steps, budget=None):
        if budget == "least":
            return {"least_bytes": 59 * MIB, "unplanned_bytes": 100 * MIB}
        if steps == 1:
            return {"refused": "too small", "needed_bytes": 60 * MIB}
        if budget is None:
            return PLAIN
        given.append(budget)
        return dict(KEPT)

    monkeypatch.setattr(judge, "_run", run)
    return given


def test_budgets_are_half_and_range_from_the_least_to_the_peak_and_half_again(runs):
    *_, found = judge.judge_network("0", 0.25)
    budgets = ["50%", *(nbytes * MIB for nbytes in (64, 74, 84, 94, 104)), "50%"]
    assert runs == [str(budget) for budget in budgets]
    assert [run["budget"] for run in found["runs"]] == budgets


def test_results_are_written_after_each_run_beside_those_of_other_networks(runs, monkeypatch, tmp_path):
    file, calls, run = tmp_path / "judge.json", count(), judge._run
    arguments = ["--networks", "1", "--spacing", "0.5", "--output", str(file)]
    assert judge.main([*arguments, "--seed", "4"]) == 0

    def interrupt(_name, steps, *budget):
        if budget and steps == judge.STEPS and next(calls) == 2:
            raise KeyboardInterrupt
        return run(_name, steps, *budget)

    monkeypatch.setattr(judge, "_run", interrupt)
    assert judge.main([*arguments, "--seed", "2"]) == 130
    assert [(found["name"], len(found["runs"])) for found in json.loads(file.read_text())] == [("2", 2), ("4", 5)]
