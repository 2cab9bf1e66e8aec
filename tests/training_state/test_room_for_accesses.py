"""Pages of host copies that a caller maps between steps stay within the budget, too."""

import io

import pytest
import torch
from torch import nn

import lmswap
from lmswap.runtime import _C
from lmswap.runtime.host_copies import HostCopies
from tests.training import session_of
from tests.training_state.test_streaming import stream_all

pytestmark = pytest.mark.cpu_only("pages of files that count against a budget")

WIDTH, MIB = 1024, 2**20
_WARM_UP = 6  # steps: plans are final after the fifth
_NOISE_BYTES = 8 * MIB  # what else the process maps meanwhile


def made(*, is_frozen=False):
    """A network with 16 MiB of weights, all of them non-resident between steps."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)), nn.Linear(WIDTH, 1, bias=False))
    model[:-1].requires_grad_(not is_frozen)
    optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
    given = {"policy": "swap_all", "weights": "swap", "min_swap_bytes": 1024}
    lmswap.enable(model, "1GiB", **given, **({} if is_frozen else {"optimizer": optimizer}))
    return model, optimizer


def backward(model):
    model(torch.ones(4, WIDTH)).sum().backward()
    model.zero_grad()


def infer(model):
    with torch.no_grad():
        model(torch.ones(4, WIDTH))


def fill(model):
    """Take and free so much that the process nearly reaches its budget with memory that is kept for reuse."""
    torch.ones(128 * MIB // 4)
    session = session_of(model)
    session.budget.nbytes = session.memory.used_bytes() + MIB


def room(model):
    session = session_of(model)
    return session.budget.nbytes - session.memory.used_bytes()


def accessible_bytes(model):
    return session_of(model).engine.host_copies.nbytes


@pytest.mark.parametrize("run", [backward, infer])
def test_steps_of_weights_that_move_leave_room_to_access_them(run):
    model, _ = made(is_frozen=True)
    for _ in range(_WARM_UP):
        run(model)
    fill(model)
    run(model)
    assert accessible_bytes(model) >= 16 * MIB
    assert room(model) >= accessible_bytes(model) - _NOISE_BYTES


@pytest.mark.parametrize("streams_gradients", [False, True])
def test_updates_leave_room_to_access_what_they_move(streams_gradients):
    model, optimizer = made()
    stream_all(model)
    if streams_gradients:
        session_of(model).updates.gradients.stream()
    for _ in range(_WARM_UP):
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
    for run in (lambda: model(torch.ones(4, WIDTH)).sum().backward(), optimizer.step):
        fill(model)
        run()
        assert accessible_bytes(model) >= 48 * MIB
        assert room(model) >= accessible_bytes(model) - _NOISE_BYTES


def test_room_is_made_only_where_the_budget_has_none(monkeypatch):
    model, _ = made(is_frozen=True)
    backward(model)
    # The sum of their bytes takes time.
    monkeypatch.setattr(HostCopies, "nbytes", property(lambda _: pytest.fail("summed up without need")))
    torch.ones(128 * MIB // 4)
    reusable_bytes = _C.heap_reusable_bytes()
    backward(model)
    assert _C.heap_reusable_bytes() >= reusable_bytes - MIB > 100 * MIB


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
def test_a_step_after_weights_were_loaded_begins_within_the_budget():
    model, _ = made(is_frozen=True)
    for _ in range(_WARM_UP):
        backward(model)
    session = session_of(model)
    session.budget.nbytes = session.memory.used_bytes() + 24 * MIB
    file = {name: each.clone() for name, each in model.state_dict().items()} | {"other": torch.ones(128 * MIB // 4)}
    model.load_state_dict(file, strict=False)
    del file
    for _ in range(2):
        backward(model)
    assert session.recorder.ended.peaks.used_bytes <= session.budget.nbytes + _NOISE_BYTES


def test_a_loaded_state_leaves_no_memory_behind():
    """Else all that the file has held is kept for reuse from then on, beside the budget."""
    model, optimizer = made()
    stream_all(model)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _C.heap_trim()
    optimizer.load_state_dict(torch.load(file))
    assert _C.heap_stats().retained_bytes < 4 * MIB
