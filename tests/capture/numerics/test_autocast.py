"""Backwards that begin under autocast."""

import copy

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.numerics.tangents import CAST


class Attending(nn.Module):
    """Products, whose gradients autocast casts, next to what it leaves alone."""

    def __init__(self):
        super().__init__()
        self.keys = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.head = nn.Conv1d(16, 4, 3)

    def forward(self, x):
        for keys, norm in zip(self.keys, self.norms, strict=True):
            x = torch.sigmoid(norm(torch.softmax(x @ keys(x).mT, -1) @ x))
        return self.head(x)


def train(model, *, casts_backward, casts_forward=False):
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(8, 16, 32)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=casts_forward):
            loss = model(x).float().square().mean()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=casts_backward):
            loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found


def enabled(model, path, **options):
    torch.compiler.reset()
    return lmswap.enable(model, compiler=path, min_swap_bytes=1024, **options)


def test_hooks_give_the_bits_of_plain_torch():
    plain = Attending()
    model = enabled(copy.deepcopy(plain), "eager", policy="swap_all")
    assert all(map(torch.equal, train(model, casts_backward=True), train(plain, casts_backward=True)))
    assert lmswap.report(model).swapped_out_bytes > 0


@pytest.mark.parametrize("casts_forward", [False, True])
@pytest.mark.parametrize("policy", ["none", "swap_all", "recompute"])
def test_graphs_cast_no_more_than_their_forward_did_which_a_note_states(policy, casts_forward):
    plain = Attending()
    model = enabled(copy.deepcopy(plain), "fx", policy=policy)
    found = train(model, casts_backward=True, casts_forward=casts_forward)
    assert all(map(torch.equal, found, train(plain, casts_backward=False, casts_forward=casts_forward)))
    assert CAST in lmswap.report(model).notes


def test_verification_reports_gradients_not_compared_with_plain_torch():
    model = enabled(Attending(), "fx", policy="swap_all", verify=True)
    train(model, casts_backward=True)
    verified = lmswap.report(model).verified
    assert verified.num_differences == 0
    assert any("under autocast" in text for text in verified.not_beside_plain)
