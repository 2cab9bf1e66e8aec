"""The comparison with peers: a tiny run and its file, cells that do not fit or break, and what its figures mean."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pynvml
import pytest
import torch

from benchmarks.peers import __main__ as main_module
from benchmarks.peers import run, tasks
from benchmarks.peers.__main__ import main
from benchmarks.peers.cell import REFERENCE, Cell, Outcome, Prediction, run_cell
from benchmarks.peers.plot import plot
from benchmarks.peers.results import Results, describe_origin, read_results
from benchmarks.peers.run import Choice
from benchmarks.peers.ways import PEERS
from lmswap.hardware.host_memory import HostMemory
from lmswap.planner import POLICIES

CELL = Cell("gpt", "small", "cpu", REFERENCE, None, None)
BITS = ({"loss": "a", "x": "b"}, {"loss": "c", "x": "d"})
RAN = Outcome(CELL, "ran", 100, (2.0, 3.0), 1.0, BITS, prediction=Prediction(110, 100, 1.0, 2.0))


def outcome(way, **changes):
    return replace(RAN, cell=replace(CELL, way=way, percent=50), **changes)


def run_narrow(cell, wait_for_turn):
    """In a child, which sees no patches: a model whose tensors are large beside the process, and its products small."""
    narrow = tasks._gpt(layers=8, width=64, heads=2, tokens=256, words=256, batch=16)
    tasks.TASKS["small"]["gpt"] = narrow
    return run_cell(cell, wait_for_turn)


@pytest.mark.slow
def test_a_run_leaves_a_file_of_each_model_and_a_picture_of_every_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_cell", run_narrow)
    arguments = ["--models", "gpt", "--budgets", "70", "1", "--policies", "recompute", "--peers", "eager"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "gpt.json").read_text())
    assert data["schema"] == "lmswap.peers/5"
    origin = {"device", "driver", "torch", "commit", "threads", "load_average", "command", "note"}
    assert origin <= data["origin"].keys()
    results = read_results(tmp_path / "gpt.json")
    none, _, fits, unfit = results.outcomes
    assert [o.cell.way for o in results.outcomes] == [REFERENCE, "eager", "recompute", "recompute"]
    assert fits.cell.budget_bytes == none.peak_bytes * 70 // 100
    assert fits.peak_bytes <= fits.cell.budget_bytes
    assert [o.other_from_step for o in results.outcomes] == [None] * 4
    assert len({tuple(bits.values()) for bits in none.bits}) == 11  # every step has its own
    assert {"loss", "words.weight", "gradient of words.weight"} <= none.bits[0].keys()
    assert all(record["bits"] == 11 * [{}] for record in data["outcomes"][1:3])  # those of the first
    assert fits.prediction.measured_seconds > 0
    assert (unfit.status, unfit.peak_bytes, unfit.step_seconds, unfit.overhead) == ("infeasible", None, (), None)
    assert unfit.needed_bytes > unfit.cell.budget_bytes
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def tiny(monkeypatch):
    """A model that is trained in this process; children do not see what a test patches."""
    gpt = tasks._gpt(layers=4, width=32, heads=2, tokens=64, words=50, batch=8)
    monkeypatch.setitem(tasks.TASKS["small"], "gpt", gpt)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch.checkpoint", "eager"])
def test_peers_train_the_same_model_on_the_same_data(tiny, way):
    found = run_cell(replace(CELL, way=way, percent=50))
    assert found.status == "ran", found.detail
    assert found.bits == run_cell(CELL).bits


def test_errors_are_outcomes(tiny, monkeypatch):
    def broken(model, task, percent):
        raise RuntimeError("no such device")

    monkeypatch.setattr("benchmarks.peers.cell._warm_up", lambda cell, device: None)
    monkeypatch.setitem(PEERS, "broken", replace(PEERS["eager"], apply=broken))
    found = run_cell(replace(CELL, way="broken"))
    assert (found.status, found.detail) == ("failed", "RuntimeError: no such device")


def test_a_model_that_cannot_be_made_is_an_outcome_too(monkeypatch):
    def make_model():
        raise MemoryError("no room")

    task = replace(tasks.TASKS["small"]["gpt"], make_model=make_model)
    monkeypatch.setitem(tasks.TASKS["small"], "gpt", task)
    found = run_cell(CELL)
    assert (found.status, found.detail) == ("failed", "MemoryError: no room")


def die(cell, wait_for_turn):
    wait_for_turn()
    if cell.way == "eager":
        os._exit(1)
    wait_for_turn()
    return replace(RAN, cell=cell)


@pytest.mark.slow
def test_a_process_that_dies_is_an_outcome_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(run, "run_cell", die)
    dead, alive = run.run_in_turns([replace(CELL, way="eager"), CELL])
    assert (dead.status, dead.peak_bytes) == ("failed", None)
    assert alive == RAN


def test_a_driver_without_a_version_is_described(monkeypatch):
    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 2))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    origin = describe_origin("cuda", "there")
    assert origin["device"] == "cuda (Some GPU)"
    assert origin["driver"].startswith("CUDA driver of unknown version")


@pytest.mark.parametrize(
    ("way", "status", "code"), [("swap", "failed", 1), ("swap", "infeasible", 0), ("eager", "failed", 0)]
)
def test_a_failure_of_lmswap_itself_is_an_error(monkeypatch, tmp_path, way, status, code):
    other = replace(outcome(way), status=status, peak_bytes=None, overhead=None)
    monkeypatch.setattr(main_module, "run_model", lambda choice, model: [RAN, other])
    assert main(["--models", "gpt", "--output", str(tmp_path)]) == code


CHOICE = Choice([50, 40], ["swap"], ["eager", "torch.checkpoint"], "small", "cpu")


def test_without_a_reference_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(run, "run_in_turns", lambda cells: [Outcome(cell, "failed") for cell in cells])
    (found,) = run.run_model(CHOICE, "gpt")
    assert (found.status, found.other_from_step, found.overhead) == ("failed", None, None)


@pytest.mark.parametrize(
    ("device", "available_bytes", "most", "together"),
    [
        ("cpu", 2**40, 6, [1, 6]),
        ("cpu", 2**40, 3, [1, 4, 3]),
        ("cpu", 3 * 2**29 + 300, 6, [1, 3, 3, 2]),
        ("cpu", 0, 6, [1] + 5 * [2]),
        ("cuda", 0, 6, 6 * [1]),
    ],
)
def test_variants_that_fit_in_memory_alternate_with_their_own_reference(
    device, available_bytes, most, together, monkeypatch
):
    monkeypatch.setattr(run, "_MAX_TOGETHER", most)
    asked = []

    def run_in_turns(cells):
        asked.append([cell.way for cell in cells])
        # Each time the machine is slower; the median of 2, 2 and 8 counts.
        reference = replace(RAN, step_seconds=tuple(len(asked) * seconds for seconds in (1.0, 1.0, 1.0)))
        other = replace(RAN, step_seconds=tuple(len(asked) * seconds for seconds in (2.0, 8.0, 2.0)))
        found = [replace(reference if cell.way == REFERENCE else other, cell=cell) for cell in cells]
        return [replace(outcome, bits=(RAN.bits[0], {"loss": "c", "x": outcome.cell.way})) for outcome in found]

    monkeypatch.setattr(run, "run_in_turns", run_in_turns)
    monkeypatch.setattr(run, "read_host_memory", lambda: HostMemory(2**40, available_bytes))
    found = list(run.run_model(replace(CHOICE, device=device), "gpt"))
    assert [len(ways) for ways in asked] == together
    if device == "cpu":
        assert all(ways[0] == REFERENCE for ways in asked)
        assert [outcome.overhead for outcome in found] == [1.0] + 5 * [2.0]
    assert {o.others for o in found[1:]} == {("x",)}
    ways = [(o.cell.way, o.cell.percent, o.cell.budget_bytes, o.other_from_step) for o in found]
    assert ways == [
        (REFERENCE, None, None, None),
        ("eager", None, None, 2),  # has no dial: it runs once; its second step's bits are others
        ("torch.checkpoint", 50, None, 2),
        ("torch.checkpoint", 40, None, 2),
        ("swap", 50, 50, 2),
        ("swap", 40, 40, 2),
    ]


def test_errors_are_those_of_the_predictions():
    exact = replace(RAN, prediction=Prediction(100, 100, 2.0, 2.0))
    assert Results({}, (RAN, exact, replace(RAN, prediction=None))).errors() == {
        "median_peak_error": pytest.approx(0.05),
        "largest_peak_error": pytest.approx(0.1),
        "median_seconds_error": pytest.approx(0.25),
        "largest_seconds_error": pytest.approx(0.5),
    }
    assert Results({}, ()).errors()["median_peak_error"] is None


def test_results_are_read_as_they_were_written(tmp_path):
    other = outcome("swap", bits=(RAN.bits[0], {"loss": "c", "x": "e"}), other_from_step=2, others=("x",))
    results = Results({"commit": "abc"}, (RAN, other, outcome("swap", prediction=None, bits=())))
    results.write(tmp_path / "peers.json")
    assert read_results(tmp_path / "peers.json") == results


def test_the_picture_needs_no_more_than_the_reference(tmp_path):
    origin = {"device": "cpu", "torch": "2", "threads": 1, "cores": 2, "load_average": 0.5, "note": ""}
    plot([Results(origin, (RAN, outcome("swap", peak_bytes=None, overhead=None)))], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_peers_and_policies_have_names_of_their_own():
    assert not set(PEERS) & set(POLICIES)
    assert not PEERS["torch.save_on_cpu"].runs_on("cpu")
    assert PEERS["eager"].runs_on("cpu")
