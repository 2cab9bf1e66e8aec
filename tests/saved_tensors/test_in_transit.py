"""Copies of a step without a plan: many small ones are under way at once, within a bound."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.runtime.engine import SwapEngine

MIB = 2**20


class Chain(nn.Module):
    """Saves a tensor for each of its ops."""

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for _ in range(self.length):
            x = torch.sin(x * self.weight)
        return x


class Dropped(Chain):
    """Computes branches whose graphs it drops at once."""

    def forward(self, x):
        for _ in range(self.length):
            torch.sin(torch.sin(x * self.weight))
        return torch.sin(x * self.weight)


@pytest.fixture
def under_way(monkeypatch):
    """Bytes of copies out that nothing has waited for, after each call of the engine; and those waited for so far."""
    started, seen, waited = {}, [], []
    out_start, wait_out = SwapEngine.out_start, SwapEngine.wait_out

    def note_start(engine, x, *given):
        token = out_start(engine, x, *given)
        started[int(token)] = x.untyped_storage().nbytes()
        seen.append(sum(started.values()))
        return token

    def note_wait(engine, token):
        wait_out(engine, token)
        waited.append(started.pop(int(token), 0))

    monkeypatch.setattr(SwapEngine, "out_start", note_start)
    monkeypatch.setattr(SwapEngine, "wait_out", note_wait)
    return seen, waited


def enabled(model):
    return lmswap.enable(model, policy="swap_all", compiler="eager", min_swap_bytes=1024)


def test_small_copies_are_not_waited_for_one_by_one(under_way):
    seen, waited = under_way
    model = enabled(Chain(40))
    waited_before = []
    model.register_forward_hook(lambda *_: waited_before.append(len(waited)))
    model(torch.ones(4096)).sum().backward()
    assert waited_before == [0]
    assert len(waited) >= 39
    assert max(seen) > 30 * 4 * 4096
    lmswap.disable(model)


@pytest.mark.parametrize("nbytes", [MIB // 2, 6 * MIB])
def test_bytes_under_way_are_bounded(under_way, nbytes):
    seen, _ = under_way
    model = enabled(Chain(20))
    model(torch.ones(nbytes // 4)).sum().backward()
    assert len(seen) >= 19
    assert max(seen) <= 4 * MIB + nbytes  # the last one is waited for before anything else runs
    lmswap.disable(model)


def test_memory_of_dropped_branches_is_free_once_their_copies_were_waited_for(under_way):
    seen, waited = under_way
    model = enabled(Dropped(30))
    model(torch.ones(MIB // 8)).sum().backward()
    assert max(seen) <= 4 * MIB + MIB // 2
    assert sum(waited) >= 25 * MIB // 2
    lmswap.disable(model)


def test_gradients_are_those_of_plain_torch_whatever_order_the_backward_takes():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.linspace(0.1, 1, 4096) * n) for n in range(1, 9))

        def forward(self, x):
            parts = [torch.sin(torch.sin(x * weight) * weight) for weight in self.weights]
            return parts[0] * parts[5], torch.stack(parts).sum(0)

    found = []
    for model in (Branches(), enabled(Branches())):
        first, second = model(torch.ones(4096))
        first.sum().backward(retain_graph=True)
        second.square().sum().backward(retain_graph=True)
        first.square().sum().backward()
        found.append([weight.grad for weight in model.weights])
    assert all(map(torch.equal, *found))
