"""Module buffers are weights, too: those that steps only read move as parameters do, and plain torch's bits result."""

import pytest
import torch
from torch import nn

import lmswap
from tests.training import session_of
from tests.training_state.adapted import same

WIDTH = 32
OPTIONS = {"policy": "swap_all", "weights": "swap", "min_swap_bytes": 512}


class Quantized(nn.Module):
    """A linear layer of 8-bit integers with a scale each row."""

    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(WIDTH, 1) / 128, persistent=False)

    def forward(self, x):
        return x @ (self.values * self.scale).t()


class Reading(nn.Module):
    """Buffers that are only read, under a trained layer."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(WIDTH, WIDTH)
        self.base = nn.Sequential(Quantized(), nn.Tanh(), Quantized())

    def forward(self, x):
        return self.base(self.trained(x)).square().mean()


class Averaging(Reading):
    """A buffer that the forward writes, one that normalization writes, and one that each call replaces."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH * WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(x[:WIDTH], 0.1)
        self.last = (x[:WIDTH] + self.last).detach()
        wide = self.norm((x[:4].unsqueeze(2) * torch.ones(WIDTH)).flatten(1))
        return super().forward(x + self.average.mean()) + wide.square().mean() + self.last.mean()


def run(kind, *, steps=4, before=lambda model: model, between=lambda model, step: None):
    torch.manual_seed(0)
    model = before(kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(WIDTH, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between(model, step)
        seen.append(loss.detach())
    return model, [*seen, *(value.detach().clone() for value in model.state_dict().values())]


def enabled(model):
    return lmswap.enable(model, "1GiB", **OPTIONS)


def is_non_resident(model, name):
    found = session_of(model).engine.host_copies.find(model.get_buffer(name).untyped_storage())
    return found is not None


def test_buffers_that_are_only_read_are_swapped():
    _, expected = run(Reading)
    model, found = run(Reading, before=enabled)
    assert same(found, expected)
    assert all(is_non_resident(model, f"base.{layer}.values") for layer in (0, 2))
    assert not is_non_resident(model, "base.0.scale")  # 128 bytes
    assert lmswap.report(model).swapped_in_bytes >= 4 * WIDTH * WIDTH  # each in the forward, and in the backward


def test_buffers_that_steps_write_or_replace_stay_resident():
    _, expected = run(Averaging)
    model, found = run(Averaging, before=enabled)
    assert same(found, expected)
    assert is_non_resident(model, "base.0.values")
    assert not any(is_non_resident(model, name) for name in ("average", "last", "norm.running_mean"))


def write(model, step):
    with torch.no_grad():
        model.get_buffer("base.0.values").add_(step)


def load(model, step):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=step == 1)


@pytest.mark.parametrize("between", [write, load])
def test_buffers_can_be_written_and_replaced_between_steps(between):
    _, expected = run(Reading, between=between)
    model, found = run(Reading, before=enabled, between=between)
    assert same(found, expected)
    lmswap.disable(model)
    assert same([*model.state_dict().values()], expected[4:])


def test_disabling_makes_buffers_resident():
    model, _ = run(Reading, before=enabled)
    held = model.get_buffer("base.0.values")
    expected = held.clone()
    lmswap.disable(model)
    assert held is model.get_buffer("base.0.values")
    assert torch.equal(held, expected)
