"""Backward gets the values of plain torch after any write to the storage since it was saved."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lmswap
from tests.cases import cases
from tests.saved_tensors.writing import Writing, instructions, train


def same(one, other):
    """Whether two trainings gave the same bits, or were refused at the same place."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and one == other
    return len(one) == len(other) and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True)
    )


def compare(program, policy):
    """Trains plainly and under hooks; what plain torch gave, and how many bytes were moved in the last step."""
    torch.manual_seed(0)
    expected = train(Writing(program))
    torch.manual_seed(0)
    model = lmswap.enable(Writing(program), "4GiB", policy=policy, compiler="eager", min_swap_bytes=1)
    try:
        actual = train(model)
        moved_bytes = lmswap.api._sessions[model].engine.native.tier_stats("disk").peak_used_bytes
    finally:
        lmswap.disable(model)
    assert [same(a, e) for a, e in zip(actual, expected, strict=True)] == [True] * len(expected), (expected, actual)
    return expected, moved_bytes


@pytest.mark.hypothesis
def test_random_programs_that_write_saved_tensors_have_plain_bits():
    happened = Counter()

    @cases(50)
    @given(instructions)
    def run(program):
        expected, moved_bytes = compare(program, "swap_all")
        kind = expected[0] if isinstance(expected[0], str) else "moved" if moved_bytes else "nothing moved"
        happened[kind] += 1

    run()
    assert happened["moved"] > 20, happened
    assert happened["refused in the backward"] > 0, happened


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self, kind, **options):
        super().__init__()
        self.inner = kind(16, 32, batch_first=True, **options)

    def forward(self, x):
        lengths = [12, 9, 12, 1]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]


class Unrolled(nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(16, 32)

    def forward(self, x):
        states, state = [], None
        for now in x.unbind(1):
            state = self.cell(now, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states)


class Leaky(nn.Module):
    """Saves the noise of `rrelu` before it is drawn."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x):
        return F.rrelu(self.linear(x), training=True).tanh()


def plain(kind, **options):
    return lambda: kind(16, 32, batch_first=True, **options)


RECURRENT = {
    "GRU": plain(nn.GRU),
    "GRU, two ways and layers, dropout": plain(nn.GRU, num_layers=2, bidirectional=True, dropout=0.3),
    "LSTM": plain(nn.LSTM),
    "LSTM with projections": plain(nn.LSTM, proj_size=8, num_layers=2),
    "RNN": plain(nn.RNN, num_layers=2),
    "packed GRU": lambda: Packed(nn.GRU, bidirectional=True),
    "packed LSTM": lambda: Packed(nn.LSTM),
    "GRUCell": lambda: Unrolled(nn.GRUCell),
    "LSTMCell": lambda: Unrolled(nn.LSTMCell),
    "RNNCell": lambda: Unrolled(nn.RNNCell),
    "rrelu": Leaky,
}


def learn(model, steps=3):
    """Losses and gradients of a few steps."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        output = model(torch.randn(4, 12, 16))
        loss = (output[0] if isinstance(output, tuple) else output).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_an_operators_own_write_after_saving_is_visible_to_backward(name):
    torch.manual_seed(0)
    expected = learn(RECURRENT[name]())
    torch.manual_seed(0)
    model = lmswap.enable(RECURRENT[name](), "4GiB", policy="swap_all", compiler="eager", min_swap_bytes=1)
    actual = learn(model)
    report = lmswap.report(model)
    lmswap.disable(model)
    assert all(map(torch.equal, actual, expected))
    assert report.swapped_out_bytes > 0


class Borrowing(nn.Module):
    """Saves memory of numpy's, which can be written without any tensor, and a tensor that is resized."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        self.array = np.full((16, 32), 2.0, dtype=np.float32)
        return (self.linear(x) * torch.from_numpy(self.array)).tanh()


def test_memory_that_numpy_may_write_stays_where_it_is():
    def gradient(model):
        loss = model(torch.ones(16, 32)).sum()
        model.array[:] = 3.0
        loss.backward()
        return model.linear.weight.grad

    torch.manual_seed(0)
    expected = gradient(Borrowing())
    torch.manual_seed(0)
    model = lmswap.enable(Borrowing(), "4GiB", policy="swap_all", compiler="eager", min_swap_bytes=1)
    actual = gradient(model)
    lmswap.disable(model)
    assert torch.equal(actual, expected)


def test_a_storage_that_ends_before_what_was_saved_of_it_is_refused():
    model = lmswap.enable(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), "4GiB", compiler="eager", min_swap_bytes=1)
    output = model(torch.ones(16, 32))
    output.untyped_storage().resize_(8)
    with pytest.raises(lmswap.errors.SavedTensorChanged, match=r"TanhBackward0 needs .*\[16, 32\].*resized to 8 bytes"):
        output.sum().backward()
    lmswap.disable(model)
