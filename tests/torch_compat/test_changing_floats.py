"""Python floats that change from step to step: bitwise identical results, without a trace for each value."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import lmswap

VALUES = (1.1, 1.2, 1.3451, 1.2, 0.0012)


class Scheduled(nn.Module):
    """A network with a number that its training changes, as an argument or as an attribute."""

    def __init__(self, use, depth=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.use, self.number = use, 1.0

    def forward(self, x, number=None):
        number = self.number if number is None else number
        for layer in self.layers:
            x = self.use(layer(x), number)
        return x


def results(model, values, *, is_attribute=False):
    torch.manual_seed(0)
    found = []
    for value in values:
        model.zero_grad()
        model.number = value
        outputs = model(torch.randn(32, 64), *(() if is_attribute else (value,)))
        outputs.float().square().sum().backward()
        found += [outputs.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found


def num_traces():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_both(use, values=VALUES, *, is_attribute=False, depth=1, **options):
    """Whether the results are plain torch's, and how often torch traced the model."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    plain = Scheduled(use, depth)
    model = lmswap.enable(copy.deepcopy(plain), **{"budget": "2GiB", **options})
    actual = results(model, values, is_attribute=is_attribute)
    report = lmswap.report(model)
    lmswap.disable(model)
    expected = results(plain, values, is_attribute=is_attribute)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    return num_traces(), report


# Ops that take a number as it is: a constant of the first trace, an input of the second one, which serves all others.
AS_INPUTS = {
    "scale": lambda y, t: (y * t).tanh(),
    "temperature": lambda y, t: (y / t).softmax(-1),
    "divided": lambda y, t: t / (y.exp() + 1),
    "base": lambda y, t: t**y,
    "expression": lambda y, t: y * (t * 2 + 1) / (3 - t) + math.sqrt(t) + t**2 + math.sin(t),
    "bfloat16": lambda y, t: y.bfloat16() * t + t,
    "float16": lambda y, t: y.half() * t / (t + 1),
    "float64": lambda y, t: y.double() * t,
    "zero dimensions": lambda y, t: y * (y.sum() * t),
    "noise": lambda y, t: y + torch.randn_like(y) * t,
    "rounded": lambda y, t: y * round(t, 2),
    "at most": lambda y, t: y * min(t / 5, 1.0),
}


@pytest.mark.parametrize("use", AS_INPUTS)
def test_a_changing_number_is_traced_twice_with_plain_bits(use):
    assert train_both(AS_INPUTS[use])[0] == 2


def test_a_changing_attribute_is_traced_twice_with_plain_bits():
    assert train_both(AS_INPUTS["scale"], is_attribute=True)[0] == 2


# Uses that decide what is computed, or ops that need the number when they are traced: some values are traced again.
AS_CONSTANTS = {
    "branch": lambda y, t: y * 2 if t > 1.25 else y * t,
    "exponent": lambda y, t: (y.abs() + 1) ** t,
    "clamped": lambda y, t: y.clamp(min=-t, max=t) * y,
    "slope": lambda y, t: functional.leaky_relu(y, t / 10),
    "dropout": lambda y, t: functional.dropout(y, t / 10) * y,
    "epsilon": lambda y, t: functional.layer_norm(y, (64,), eps=t),
    "integer": lambda y, t: y * int(t * 10),
    "filled": lambda y, t: y * torch.full((64,), t),
    "tensor": lambda y, t: y * torch.tensor(t),
    "condition": lambda y, t: torch.where(y > t, y * t, t),
    "size": lambda y, t: y * torch.ones(int(t * 10) + 1).sum(),
    "formatted": lambda y, t: y * float(f"{t:.2f}"),
    "text": lambda y, t: y * float(str(t)[:4]),
    "key": lambda y, t: y * {1.1: 2.0, 1.2: 3.0}.get(t, 5.0),
    "attention": lambda y, t: functional.scaled_dot_product_attention(y[None], y[None], y[None], scale=t)[0],
}


@pytest.mark.parametrize("use", AS_CONSTANTS)
def test_a_changing_number_that_is_needed_in_a_trace_has_plain_bits(use):
    train_both(AS_CONSTANTS[use])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -0.0, 1e-320, 3])
def test_special_numbers_have_plain_bits(value):
    torch.compiler.reset()
    plain = Scheduled(lambda y, t: (y * t).tanh().nan_to_num())
    model = lmswap.enable(copy.deepcopy(plain), "2GiB")
    actual, expected = (results(each, (1.1, 1.2, value, 1.3)) for each in (model, plain))
    lmswap.disable(model)
    assert all(torch.equal(a, b) or bool(b.isnan().any()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("options", [{"policy": "swap_all"}, {"verify": True}, {"compiler": "eager"}])
def test_a_changing_number_has_plain_bits_where_tensors_are_swapped(options):
    _, report = train_both(AS_INPUTS["expression"], depth=3, min_swap_bytes=4096, **options)
    assert report.swapped_out_bytes > 0 or "policy" not in options
