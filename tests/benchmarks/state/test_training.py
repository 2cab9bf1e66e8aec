"""Ways have plain torch's bits, in parameters and state, with what has been saved and loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.state import training
from benchmarks.state.moved import NUM_PARTS, MovedState, parts_of
from benchmarks.state.run import part_bytes
from benchmarks.state.tasks import TASKS
from benchmarks.state.training import train
from benchmarks.weights.outcomes import Run, Steps
from benchmarks.weights.paced_file import PacedFile

PLAIN = Run("gpt", "tiny", None, "plain", "cpu", steps=Steps(2, 1, 1))
MOVED = replace(PLAIN, way="moved state", bytes_per_second=1e9, num_blocks=8)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "resnet50"])
def test_moved_state_has_the_bits_of_plain_torch(task):
    expected, found = (train(replace(run, task=task)) for run in (PLAIN, MOVED))
    assert (expected.status, found.status) == ("ran", "ran"), found.detail
    assert (found.bits, found.trained) == (expected.bits, expected.trained)
    assert len(set(found.bits)) == 4
    assert found.state_bytes == expected.state_bytes
    assert set(found.peaks) < set(expected.peaks) == {"first step", "steps", "save", "load"}


@pytest.mark.slow
def test_lmswap_has_the_bits_of_plain_torch():
    expected, found = (
        train(replace(PLAIN, task="vit", way=way, budget_bytes=2**30, bytes_per_second=1e9))
        for way in ("plain", "lmswap")
    )
    assert (found.bits, found.trained) == (expected.bits, expected.trained), found.detail
    assert set(found.peaks) == set(expected.peaks)
    assert found.report["predicted_peak_bytes"] and found.report["measured_seconds"]


def test_each_update_copies_the_parts_that_are_moved():
    found = train(replace(MOVED, num_blocks=len(part_bytes(PLAIN))))
    assert found.read_bytes == sum(part_bytes(PLAIN)) * 3 / 4  # the first update makes it


def test_sgd_moves_one_value_of_each_parameter():
    parameters = [torch.nn.Parameter(torch.ones(2**10)) for _ in range(4)]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    state = MovedState(optimizer, 4, 1e9)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(2**10)
        state.step()
    assert state.read_bytes == 4 * 2**12
    assert sum(each["momentum_buffer"].numel() for each in optimizer.state.values()) == 0
    state.fetch_all()
    assert all(each["momentum_buffer"].eq(1.9).all() for each in optimizer.state.values())
    assert optimizer.param_groups[0]["params"] == parameters


def test_parts_are_consecutive_and_even():
    parameters = [torch.empty(10) for _ in range(4 * NUM_PARTS)]
    parts = parts_of(parameters)
    assert [len(part) for part in parts] == NUM_PARTS * [4]
    assert [id(each) for part in parts for each in part] == [*map(id, parameters)]
    assert len(parts_of([torch.empty(1000), torch.empty(1)])) == 2


def test_wrong_bytes_of_moved_state_show_in_the_bits(monkeypatch):
    def write(self, stored, source):
        write_right(self, stored, source + 1)

    write_right = PacedFile.write
    monkeypatch.setattr(PacedFile, "write", write)
    assert train(MOVED).bits != train(PLAIN).bits


def test_what_is_not_loaded_shows_in_the_bits(monkeypatch):
    expected = train(PLAIN)
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", lambda self, saved: None)
    found = train(PLAIN)
    assert found.bits[:3] == expected.bits[:3]  # one of them after loading: parameters are loaded
    assert found.bits[3] != expected.bits[3]


def test_gradients_are_clipped(monkeypatch):
    expected = train(PLAIN)
    monkeypatch.setattr(training, "MAX_NORM", 1e9)
    assert train(PLAIN).trained != expected.trained


def test_tasks_that_are_not_saved_have_no_such_peaks(monkeypatch):
    unsaved = replace(TASKS["gpt"]["tiny"], is_saved=False)
    monkeypatch.setitem(training.TASKS["gpt"], "tiny", unsaved)
    assert set(train(PLAIN).peaks) == {"first step", "steps"}


@pytest.mark.parametrize(
    ("task", "size", "least"), [("gpt", "cpu", 200e6), ("gpt", "5b", 5e9), ("vit", "vit-g", 1.1e9)]
)
def test_large_sizes_have_the_parameters_of_their_names(task, size, least):
    assert least <= sum(parameter.numel() for parameter in TASKS[task][size].on_meta().parameters()) < 1.1 * least
