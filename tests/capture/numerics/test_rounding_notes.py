"""Operators that a trace cannot represent as eager torch runs them are named in a note, others are not."""

import pytest
import torch
from torch import nn

from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE, numerics_note
from tests.capture.captured import capture

ROUNDED = {
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, x[0, 0]),
    "unsafe_split": lambda x: x.unsafe_split(2, 1)[0],
}


def said_of(function) -> str | None:
    recording, _ = capture(lambda x: function(x.tanh()), torch.rand(4, 6, requires_grad=True))
    return numerics_note(recording.lowered[0])


@pytest.mark.parametrize("name", ROUNDED)
def test_operators_that_no_trace_reproduces_are_named(name):
    sentence = said_of(ROUNDED[name])
    assert sentence.startswith(f"{ROUNDED_OTHERWISE}: aten.{name}: ")


@pytest.mark.parametrize(
    "function", [lambda x: x.max(1)[0], lambda x: x.masked_fill(x > 0.5, 2.0), lambda x: x.cumsum(1)]
)
def test_no_note_on_operators_that_equal_eager_torch_bitwise(function):
    assert said_of(function) is None


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Halves(nn.Module):
    """Reads its input twice, as it may: that is no weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.one(x) + self.other(x)


@pytest.mark.parametrize(("model", "is_named"), [(Shared(), True), (Halves(), False)])
def test_a_weight_that_autocast_casts_more_than_once_is_named(model, is_named):
    with torch.autocast("cpu", torch.bfloat16):
        recording, _ = capture(model, torch.rand(4, 6))
    sentence = numerics_note(recording.lowered[0])
    assert (sentence or "").startswith(f"{ROUNDED_OTHERWISE}: _to_copy: eager torch casts a weight once") == is_named
