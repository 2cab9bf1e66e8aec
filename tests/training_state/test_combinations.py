"""Every optimizer of torch with every way of its updates, of clipping and of accumulation: results of plain torch."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import lmswap
from lmswap.errors import NotManaged
from tests.training import session_of
from tests.training_state.test_streaming import same

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
        updates.gradients.stream()
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


def streaming(model, optimizer):
    """Enable ``model`` so that all of its training state streams."""
    lmswap.enable(model, "1GiB", optimizer=optimizer, policy="swap_all", weights="swap", min_swap_bytes=1024)
    updates = session_of(model).updates
    updates.stream_state(updates.state_bytes)
    updates.gradients.stream()


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def tensors_of(model, optimizer):
    state = (optimizer.state[parameter] for parameter in model.parameters())
    return [*model.parameters(), *(each for values in state for each in values.values() if torch.is_tensor(each))]


def test_two_models_that_train_against_each_other_have_plain_bits():
    """As in a GAN: a step of one differentiates the other, whose gradients it drops."""

    def trained(enable):
        torch.manual_seed(0)
        makes, judges = layers(8, 16), layers(16, 1)
        making, judging = optim.Adam(makes.parameters()), optim.RMSprop(judges.parameters())
        if enable:
            streaming(makes, making)
            streaming(judges, judging)
        for step in range(STEPS):
            torch.manual_seed(step)
            real, noise = torch.randn(4, 16), torch.randn(4, 8)
            (judges(makes(noise).detach()).square().mean() - judges(real).square().mean()).backward()
            judging.step()
            judging.zero_grad()
            judges(makes(noise)).square().mean().backward()
            making.step()
            making.zero_grad()
            judging.zero_grad()
        return [*tensors_of(makes, making), *tensors_of(judges, judging)]

    assert same(trained(enable=True), trained(enable=False))


@pytest.mark.parametrize("kind", ["a model of its own", "buffers"])
def test_averages_of_weights_that_stream_have_plain_bits(kind):
    """A copy that ``AveragedModel`` updates, or one in buffers of the model, between two updates."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(8, 1)
            for number, parameter in enumerate(self.layers.parameters()):
                self.register_buffer(f"average{number}", parameter.detach().clone())

        def forward(self, x):
            return self.layers(x)

    def trained(enable):
        torch.manual_seed(0)
        model = Averaged()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        averaged = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        if enable:
            streaming(model, optimizer)
        seen = []
        for step in range(STEPS):
            torch.manual_seed(step)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "buffers":
                for average, parameter in zip(model.buffers(), model.parameters(), strict=True):
                    average.lerp_(parameter.detach(), 0.1)
            else:
                averaged.update_parameters(model)
                seen.append(averaged(torch.ones(1, 8)).detach())
        return [*seen, *tensors_of(model, optimizer), *model.buffers(), *averaged.parameters()]

    assert same(trained(enable=True), trained(enable=False))


@pytest.mark.parametrize("clip", CLIPS)
def test_lbfgs_which_stays_resident_has_plain_bits(clip):
    def trained(enable):
        torch.manual_seed(0)
        model = layers(8, 1)
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if enable:
            with pytest.warns(NotManaged, match="LBFGS: its state, .* stay resident"):
                lmswap.enable(model, "1GiB", optimizer=optimizer, policy="swap_all", min_swap_bytes=1024)
        inputs = torch.randn(4, 8)

        def closure():
            optimizer.zero_grad()
            for part in inputs.split(2):  # two backwards
                loss = model(part).square().mean()
                loss.backward()
            CLIPS[clip](model.parameters())
            return loss

        return [*(optimizer.step(closure).detach() for _ in range(STEPS)), *model.parameters()]

    assert same(trained(enable=True), trained(enable=False))


def test_a_parameter_that_is_added_or_frozen_later_has_plain_bits():
    def trained(enable):
        torch.manual_seed(0)
        model = nn.Sequential(layers(8, WIDTH), layers(WIDTH, 1))
        optimizer = optim.AdamW(model[1].parameters(), lr=1e-2)
        if enable:
            streaming(model, optimizer)
        for step in range(2 * STEPS):
            if step == 2:
                optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 1e-3})
            if step == 4:
                model[1].requires_grad_(False)
            torch.manual_seed(step)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return tensors_of(model, optimizer)

    assert same(trained(enable=True), trained(enable=False))
