"""Trained parameters are non-resident between steps, updates fetch them, and results are those of plain torch."""

import copy

import pytest
import torch
from torch import nn

import lmswap
from tests.training import session_of
from tests.training_state.test_streaming import OPTIMIZERS, WIDTH, all_tensors, made, same, train

STEPS = 3


def enabled(model, optimizer, **options):
    """Enable ``model`` so that its plans swap all weights."""
    given = {"policy": "swap_all", "weights": "swap", "min_swap_bytes": 1024}
    lmswap.enable(model, "1GiB", optimizer=optimizer, **(given | options))
    session_of(model).updates.of_each[0]._max_chunk_bytes = 5 * WIDTH * WIDTH * 4


def non_resident_parameters(model):
    find = session_of(model).engine.host_copies.find
    return [name for name, each in model.named_parameters() if find(each.untyped_storage()) is not None]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_non_resident_parameters_have_plain_bits(name):
    plain, plain_optimizer = made(name)
    expected = train(plain, plain_optimizer, STEPS)
    model, optimizer = made(name)
    enabled(model, optimizer)
    assert same(train(model, optimizer, STEPS), expected)
    assert len(non_resident_parameters(model)) == sum(each.ndim == 2 for each in model.parameters())
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))
    lmswap.disable(model)
    assert same(train(model, optimizer, 1), train(plain, plain_optimizer, 1))


def test_state_and_parameters_stream_together():
    plain, plain_optimizer = made("adamw foreach")
    expected = train(plain, plain_optimizer, STEPS)
    model, optimizer = made("adamw foreach")
    enabled(model, optimizer)
    state = session_of(model).updates
    state.stream_state(state.state_bytes)
    assert same(train(model, optimizer, STEPS), expected)
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))
    report = lmswap.report(model)
    weights = sum(each.nbytes for name, each in model.named_parameters() if each.ndim == 2 and name != "unused")
    assert report.state_in_bytes == report.state_out_bytes == 4 * weights  # and three values of state: amsgrad


def test_what_another_optimizer_updates_stays_resident():
    model, _ = made()
    layers = [layer for layer in model.layers if isinstance(layer, nn.Linear)]
    optimizer = torch.optim.AdamW(layers[0].parameters())
    enabled(model, optimizer)
    train(model, optimizer, 2)
    assert non_resident_parameters(model) == ["unused", "layers.0.weight"]


class Sliced(nn.Module):
    """Two parameters in one memory."""

    def __init__(self):
        super().__init__()
        both = torch.randn(2, WIDTH, WIDTH)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, x):
        return (x @ self.first @ self.second).square().mean()


def test_parameters_that_share_memory_stay_resident():
    def trained(enable):
        torch.manual_seed(0)
        model = Sliced()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if enable:
            enabled(model, optimizer)
        seen = train(model, optimizer)
        return model, [*seen, *all_tensors(model, optimizer)]

    model, found = trained(enable=True)
    assert same(found, trained(enable=False)[1])
    assert not non_resident_parameters(model)


def test_an_earlier_loss_that_is_kept_lets_weights_move():
    model, optimizer = made()
    enabled(model, optimizer)
    kept = []
    for _ in range(3):
        kept.append(model(torch.randn(4, WIDTH)))
        kept[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(non_resident_parameters(model)) == 7
    assert not any("is not swapped" in note for note in lmswap.report(model).notes)


def test_training_resumes_from_saved_weights_and_state():
    plain, plain_optimizer = made()
    train(plain, plain_optimizer)
    saved = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    expected = train(plain, plain_optimizer, first=4)
    model, optimizer = made()
    enabled(model, optimizer)
    train(model, optimizer, 2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert same(train(model, optimizer, first=4), expected)
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))


def test_several_optimizers_of_one_model():
    def trained(enable):
        model, _ = made()
        matrices = [each for each in model.parameters() if each.ndim == 2]
        others = [each for each in model.parameters() if each.ndim < 2]
        optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
        if enable:
            enabled(model, optimizers)
            updates = session_of(model).updates
            updates.stream_state(updates.state_bytes)
            updates.gradients.stream()
        seen = []
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = model(torch.randn(4, WIDTH))
            loss.backward()
            seen.append(loss.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return model, [*seen, *all_tensors(model, optimizers[0]), *all_tensors(model, optimizers[1])]

    model, found = trained(enable=True)
    assert same(found, trained(enable=False)[1])
    assert len(non_resident_parameters(model)) == 7
    lmswap.disable(model)


def test_a_call_is_captured_while_an_earlier_loss_is_kept():
    """A graph refers to parameters then, which is examined in the middle of a trace."""
    model, optimizer = made()
    enabled(model, optimizer)
    loss = model(torch.randn(4, WIDTH))
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    model(torch.randn(6, WIDTH)).backward()
    assert loss.requires_grad
    assert not any("path:" in note for note in lmswap.report(model).notes)
