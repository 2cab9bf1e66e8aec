"""Differences between graphs and the code that they replace are reported."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import lmswap
from lmswap.capture.unsupported import FLEX_ATTENTION


class Flex(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return flex_attention(q, k, v, score_mod=lambda score, _batch, _head, row, column: score + (row - column))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("compiler", "notes"), [("fx", [FLEX_ATTENTION]), ("eager", [])])
def test_attention_that_needs_inductor_is_reported(compiler, notes):
    torch.compiler.reset()
    model, x = Flex().requires_grad_(False), torch.randn(2, 64, 32)  # torch has no backward of it on CPUs
    expected = model(x)
    lmswap.enable(model, "2GiB", compiler=compiler)
    assert torch.equal(model(x), expected)
    assert [note for note in lmswap.report(model).notes if note.startswith("flex_attention")] == notes
    lmswap.disable(model)
