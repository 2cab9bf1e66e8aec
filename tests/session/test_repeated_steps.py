"""Steps of a final plan that moves nothing repeat one another, and are looked at again when memory has grown."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import BudgetExceeded
from lmswap.runtime.recorder import STEPS_PER_LAP
from tests.training import session_of

MIB = 2**20

pytestmark = [
    pytest.mark.cpu_only("an arena or torch's allocator is looked at in each step"),
    pytest.mark.usefixtures("no_garbage"),
]


def train(model, num_steps=1):
    for _ in range(num_steps):
        model(torch.ones(32, 64)).sum().backward()
        model.zero_grad()


@pytest.fixture
def model():
    """A model whose last step was looked at, and the next ones of which repeat it."""
    torch.compiler.reset()
    model = lmswap.enable(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), "2GiB")
    train(model, 9)
    lmswap.report(model)
    yield model
    lmswap.disable(model)


@pytest.fixture
def looks(model, monkeypatch):
    """The numbers of the steps whose peaks were read at their end."""
    memory, recorder, looks = session_of(model).memory, session_of(model).recorder, []
    lap_peaks = memory.lap_peaks

    def counted(*, restart=False):
        looks.extend([recorder.num_steps + 1] * restart)
        return lap_peaks(restart=restart)

    monkeypatch.setattr(memory, "lap_peaks", counted)
    return looks


def test_repeated_steps_read_the_peak_of_all_memory_at_a_stated_interval(model, looks):
    train(model, 3 * STEPS_PER_LAP + 1)
    assert len(looks) == 3
    assert {after - before for before, after in pairwise(looks)} == {STEPS_PER_LAP}
    assert lmswap.report(model).steps == looks[-1]  # a report reads it


def test_growth_besides_tensors_is_warned_of_within_the_interval(model, monkeypatch):
    monkeypatch.setattr(session_of(model).memory, "lap_peaks", lambda **_: (2**31 + 3 * MIB, MIB))
    with pytest.warns(BudgetExceeded, match=r"one of steps \d+ to \d+ of Sequential held .* 3\.00 MiB more"):
        train(model, STEPS_PER_LAP)


def test_growth_of_tensors_is_warned_of_when_the_backward_has_ended(model, monkeypatch):
    train(model, 2)
    memory = session_of(model).memory
    loss = model(torch.ones(32, 64)).sum()
    monkeypatch.setattr(memory, "lap_peaks", lambda **_: (2**31 + 3 * MIB, 2**31))
    monkeypatch.setattr(memory, "lap_tensor_peak_bytes", lambda: 2**31)
    with pytest.warns(BudgetExceeded, match=r"3\.00 MiB more"):
        loss.backward()


def test_tensors_that_come_to_be_held_between_steps_are_noted_at_the_next_one(model):
    train(model, 2)
    kept = torch.ones(20 * MIB // 4)
    session = session_of(model)
    number = session.recorder.num_steps + 1  # the step under way
    train(model)
    assert session.budget.held[1:] == (pytest.approx(kept.nbytes, rel=0.01), number)


def test_a_step_of_another_graph_is_looked_at(model, looks):
    train(model, 2)
    assert not looks
    model(torch.ones(3, 64)).sum().backward()
    session_of(model).recorder.end_if_complete()
    assert looks[-1] == session_of(model).recorder.ended.number
