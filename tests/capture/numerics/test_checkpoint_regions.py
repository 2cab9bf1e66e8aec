"""Regions of torch's checkpoint have the effects, repeated or omitted, that they have in eager torch."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lmswap


class Region(nn.Module):
    """Two branches that meet; one goes through a checkpoint."""

    def __init__(self, **how):
        super().__init__()
        self.how = {"use_reentrant": False, **how}
        self.before, self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.other(x) + checkpoint(self.inside, self.before(x), **self.how)

    def inside(self, x):
        return self.inner(x).tanh()


class Normed(Region):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def inside(self, x):
        return self.norm(super().inside(x))


class Counting(Region):
    """Writes a buffer by indexing, within a checkpoint in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def inside(self, x):
        return checkpoint(self.count, x, use_reentrant=False)

    def count(self, x):
        self.seen[1:3] += x.detach().mean()
        return super().inside(x) * self.seen[1]


class WritesBatch(Region):
    """Writes into an argument of the model, from a closure."""

    def forward(self, x):
        own = x.clone()
        return self.other(own) + checkpoint(lambda h: self.inside(h + x.add_(1).mean()), self.before(own), **self.how)


class Drawing(Region):
    def __init__(self):
        super().__init__(preserve_rng_state=False)

    def inside(self, x):
        return nn.functional.dropout(super().inside(x).sin(), 0.5)


class FromBatch(Region):
    """The checkpoint's only argument needs no gradient, so that reentrant ones pass none to what is inside."""

    def __init__(self):
        super().__init__(use_reentrant=True)

    def forward(self, x):
        return self.other(x) + checkpoint(self.inside, x, **self.how)


class FromContainer(FromBatch):
    """Eager torch does not look into containers for what needs a gradient."""

    def forward(self, x):
        return self.other(x) + checkpoint(lambda given: self.inside(given["h"]), {"h": self.before(x)}, **self.how)


class OneOfTwo(FromBatch):
    """One argument needs a gradient: gradients pass."""

    def forward(self, x):
        return self.other(x) + checkpoint(lambda x, h: self.inside(x) * h.sum(), x, self.before(x), **self.how)


class Frozen(Normed):
    """Statistics that are only read."""

    def forward(self, x):
        self.norm.eval()
        return super().forward(x)


WITH_EFFECTS = {
    Normed: "writes into a buffer",
    Counting: "writes into a buffer",
    WritesBatch: "writes into a buffer or an input",
    Drawing: "preserve_rng_state=False and is random",
    FromBatch: "passes no gradient",
    FromContainer: "passes no gradient",
}


def train(model):
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        model.zero_grad()
        batch = torch.randn(6, 8)
        loss = model(batch).square().sum()
        loss.backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
        found += [loss.detach(), batch, torch.rand(3), *(b.clone() for b in model.buffers()), *gradients]
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("make", [*WITH_EFFECTS, OneOfTwo, Frozen])
def test_a_checkpoint_has_the_effects_that_it_has_in_eager_mode(make):
    torch.compiler.reset()
    torch.manual_seed(0)
    expected = train(make())
    torch.manual_seed(0)
    model = lmswap.enable(make(), "2GiB", policy="swap_all", min_swap_bytes=1)
    assert all(map(torch.equal, train(model), expected))
    notes = lmswap.report(model).notes
    lmswap.disable(model)
    if make in WITH_EFFECTS:
        assert any(WITH_EFFECTS[make] in note and "test_checkpoint_regions.py" in note for note in notes)
    else:
        assert not any("saved-tensor hooks" in note for note in notes)


def test_verification_accepts_a_checkpoint_with_effects():
    torch.compiler.reset()
    model = lmswap.enable(Normed(), "2GiB", policy="swap_all", min_swap_bytes=1, verify=True)
    train(model)
    assert model.norm.num_batches_tracked == 4
    lmswap.disable(model)


def test_checkpoints_with_effects_are_captured_without_gradients():
    torch.compiler.reset()
    model = lmswap.enable(Normed(), "2GiB")
    with torch.no_grad():
        model(torch.randn(6, 8))
    assert model.norm.num_batches_tracked == 1
    assert not any("saved-tensor hooks" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)
