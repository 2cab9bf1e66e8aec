"""The report notes graphs whose outputs are views of one tensor: gradients may be added in another order."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from tests.models import quick_of

pytestmark = pytest.mark.cpu_only("who adds gradients, and in which order, is autograd's, on the host")


class Returns(nn.Module):
    """Returns what ``outputs`` makes of a hidden tensor and of what computes on from there."""

    def __init__(self, outputs, *, is_base):
        super().__init__()
        self.first, self.mix, self.other = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.outputs, self.is_base = outputs, is_base

    def forward(self, x):
        hidden = self.first(x)  # of three dimensions, a view itself
        return self.outputs(
            torch.tanh(hidden) if self.is_base else hidden,
            lambda h: torch.tanh(self.mix(h)),
            lambda h: torch.sin(self.other(h)),
        )


def late(h, mix, _):
    mixed = mix(h)
    return h, h[:, :8], mixed


def between(h, mix, other):
    mixed = mix(h)
    return h, h[:, :8], mixed, other(h)


def of_a_view(h, mix, other):
    turned = h.transpose(0, 1)
    return turned, mix(h), turned.sin(), h.view(-1)


OTHERWISE = {
    "itself and a view": lambda h, mix, _: (h, h[:, :8], mix(h)),
    "two views": lambda h, mix, _: (h[:, :8], h.view(-1), mix(h)),
    "in another order than made": lambda h, mix, _: (*(h[:, :8], h[:4])[::-1], mix(h)),
    "a residual": lambda h, mix, _: (h, h.transpose(0, 1), h + mix(h)),
    "between two uses": between,
    "a view that is used": of_a_view,
    "pieces and a view": lambda h, mix, _: (h, h[:4], *h.chunk(2, -1), mix(h)),
}
ALIKE = {
    "one view": lambda h, mix, other: (h[:, :8], mix(h), other(h)),
    "itself": lambda h, mix, other: (h, mix(h), other(h)),
    "pieces": lambda h, mix, _: (*h.chunk(2, -1), mix(h)),
    "itself and pieces": lambda h, mix, _: (h, *h.chunk(2, -1), mix(h)),
    "no other use": lambda h, *_: (h, h[:, :8]),
    "views made after the use": late,
    "a use without gradient": lambda h, mix, _: (h, h[:, :8], mix(h.detach()) * h.argmax(-1, keepdim=True)),
    "a clone, as the note says": lambda h, mix, _: (h, h[:, :8].clone(), mix(h)),
}


def drive(model):
    torch.manual_seed(1)
    gradients = []
    for _ in range(3):
        returned = model(torch.randn(8, 16, 64))
        sum(one.square().mean() if number % 2 else one.sin().mean() for number, one in enumerate(returned)).backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return gradients


def both(outputs, *, is_base):
    """The gradients by plain torch and by lmswap, and what is said of rounding."""
    torch.compiler.reset()
    torch.manual_seed(0)
    expected = drive(Returns(outputs, is_base=is_base))
    torch.manual_seed(0)
    model = lmswap.enable(Returns(outputs, is_base=is_base), policy="swap_all", budget="1GiB", min_swap_bytes=1)
    actual = drive(model)
    notes = [note for note in lmswap.report(model).notes if note.startswith(ROUNDED_OTHERWISE)]
    lmswap.disable(model)
    return expected, actual, notes


@pytest.mark.parametrize("is_base", quick_of([True, False], [True]))
@pytest.mark.parametrize("outputs", OTHERWISE.values(), ids=OTHERWISE)
def test_views_whose_gradients_are_added_first_are_reported(outputs, is_base):
    expected, actual, notes = both(outputs, is_base=is_base)
    assert not all(map(torch.equal, actual, expected))  # else there is nothing to report
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert ["several views of one tensor" in note for note in notes] == [True]


@pytest.mark.parametrize("is_base", quick_of([True, False], [False]))
@pytest.mark.parametrize("outputs", ALIKE.values(), ids=ALIKE)
def test_no_note_where_the_order_is_that_of_plain_torch(outputs, is_base):
    expected, actual, notes = both(outputs, is_base=is_base)
    assert all(map(torch.equal, actual, expected))
    assert len(actual) == len(expected)
    assert notes == []
