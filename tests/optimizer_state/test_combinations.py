"""Every optimizer of torch with every way of its updates, of clipping and of accumulation: results of plain torch."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import lmswap
from tests.optimizer_state.test_streaming import same
from tests.training import session_of

WIDTH, STEPS = 48, 3
LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
# Optimizers, and the ways of their updates.
KINDS = {
    "adam": (optim.Adam, (LOOP, FOREACH, FUSED)),
    "adamw amsgrad": (partial(optim.AdamW, amsgrad=True), (LOOP, FOREACH, FUSED)),
    "sgd": (partial(optim.SGD, lr=1e-2), (LOOP, FOREACH, FUSED)),
    "sgd momentum": (partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True), (LOOP, FOREACH, FUSED)),
    "adagrad": (optim.Adagrad, (LOOP, FOREACH, FUSED)),
    "rmsprop": (partial(optim.RMSprop, centered=True, momentum=0.5), (LOOP, FOREACH)),
    "adadelta": (optim.Adadelta, (LOOP, FOREACH)),
    "adamax": (optim.Adamax, (LOOP, FOREACH)),
    "nadam": (optim.NAdam, (LOOP, FOREACH)),
    "radam": (optim.RAdam, (LOOP, FOREACH)),
    "asgd": (optim.ASGD, (LOOP, FOREACH)),
    "rprop": (optim.Rprop, (LOOP, FOREACH)),
    "adafactor": (optim.Adafactor, (LOOP, FOREACH)),
    "muon": (optim.Muon, ({},)),
}
UPDATES = {f"{name} {' '.join(way)}": (kind, way) for name, (kind, ways) in KINDS.items() for way in ways}
CLIPS = {
    "no clip": lambda parameters: None,
    "norm": partial(clip_grad_norm_, max_norm=0.01),
    "norm foreach": partial(clip_grad_norm_, max_norm=0.01, foreach=True),
    "value": partial(clip_grad_value_, clip_value=1e-4),
}
# Each way of clipping and each number of backwards, without the pairs of both.
QUICK = {("no clip", 1), ("norm", 4), ("value", 1)}


class Branches(nn.Module):
    """A branch of two layers, without biases, for each optimizer: one capture serves them all."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in UPDATES
        )

    def forward(self, x):
        return sum(branch(x).square().mean() for branch in self.branches)


def trained(clip, backwards, *, enable):
    """The parameters and the state of each optimizer, by its name."""
    torch.manual_seed(0)
    model = Branches()
    optimizers = [
        kind([*branch.parameters()], **way)
        for branch, (kind, way) in zip(model.branches, UPDATES.values(), strict=True)
    ]
    if enable:
        lmswap.enable(
            model, "1GiB", optimizer=optimizers, policy="swap_all", weights="swap", min_swap_bytes=WIDTH * WIDTH * 4
        )
        updates = session_of(model).updates
        for each in updates.of_each:
            each._max_chunk_bytes = 1  # a layer
        updates.stream_state(updates.state_bytes)
        updates.stream_gradients()
    for step in range(STEPS):
        torch.manual_seed(step)
        for _ in range(backwards):
            (model(torch.randn(4, WIDTH)) / backwards).backward()
        for optimizer, branch in zip(optimizers, model.branches, strict=True):
            CLIPS[clip](branch.parameters())
            optimizer.step()
        model.zero_grad()
    found = {
        name: [
            *branch.parameters(),
            *(each for p in branch.parameters() for each in optimizer.state[p].values() if torch.is_tensor(each)),
        ]
        for name, branch, optimizer in zip(UPDATES, model.branches, optimizers, strict=True)
    }
    if enable:
        find = session_of(model).engine.host_copies.find
        moved = (each for tensors in found.values() for each in tensors if each.nbytes == WIDTH * WIDTH * 4)
        assert all(find(each.untyped_storage()) is not None for each in moved)
    return found


@pytest.mark.parametrize(
    ("clip", "backwards"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in product(CLIPS, (1, 4))],
)
def test_all_updates_have_plain_bits(clip, backwards):
    expected, found = (trained(clip, backwards, enable=enable) for enable in (False, True))
    assert [name for name in UPDATES if not same(found[name], expected[name])] == []
