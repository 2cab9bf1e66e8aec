"""An update takes the memory that is planned for it, of whatever optimizer."""

import gc

import pytest
import torch
from torch import nn, optim

import lmswap
from lmswap.errors import PlanInfeasible
from tests.training import session_of

WIDTH = 256  # of a layer of 256 KiB, beside which scalars are nothing
KINDS = {
    "adamw": optim.AdamW,
    "adam with decay": lambda layer: optim.Adam(layer, weight_decay=0.1),
    "adam foreach with decay": lambda layer: optim.Adam(layer, weight_decay=0.1, foreach=True),
    "adam fused": lambda layer: optim.Adam(layer, weight_decay=0.1, fused=True),
    "sgd": lambda layer: optim.SGD(layer, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adadelta with decay": lambda layer: optim.Adadelta(layer, weight_decay=0.1),
    "adadelta foreach": lambda layer: optim.Adadelta(layer, weight_decay=0.1, foreach=True),
    "rprop": optim.Rprop,
    "rprop foreach": lambda layer: optim.Rprop(layer, foreach=True),
    "adafactor": optim.Adafactor,
    "muon": optim.Muon,
}


# The updates of others run in chunks although all is resident.
WHOLE = {name: kind for name, kind in KINDS.items() if "foreach" not in name}


class Layers(nn.ModuleList):
    """A layer for each optimizer."""

    def __init__(self, kinds):
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False) for _ in kinds)

    def forward(self, x):
        return sum(layer(x).square().mean() for layer in self)


def updates_of(model, kinds, **given):
    """Enable ``model`` with an optimizer for each layer; return the updates of all."""
    optimizers = [kind([*layer.parameters()]) for kind, layer in zip(kinds.values(), model, strict=True)]
    lmswap.enable(model, "1GiB", optimizer=optimizers, min_swap_bytes=WIDTH * WIDTH * 4, **given)
    return session_of(model).updates


def shares_taken(model, updates, kinds):
    """By optimizer, what an update after the first takes, in multiples of what is planned."""
    memory, shares = session_of(model).memory, {}
    for step in range(2):
        model(torch.randn(4, WIDTH)).backward()
        for name, each in zip(kinds, updates.of_each, strict=True):
            planned_bytes = each.window_bytes()
            memory.reset_tensor_peak()
            before_bytes = memory.used_tensor_bytes()
            each.optimizer.step()
            taken_bytes = memory.peak_tensor_bytes() - before_bytes
            if step:
                shares[name] = taken_bytes / planned_bytes if planned_bytes else 1 + taken_bytes
        model.zero_grad()
    return shares


@pytest.mark.cpu_only("its memory is counted by the byte")
def test_an_update_of_what_streams_takes_what_is_planned():
    model = Layers(KINDS)
    updates = updates_of(model, KINDS, policy="swap_all", weights="swap")
    updates.stream_state(updates.state_bytes)
    updates.gradients.stream()
    shares = shares_taken(model, updates, KINDS)
    assert {name: share for name, share in shares.items() if not 0.99 < share <= 1.01} == {}
    assert updates.update_bytes == max(each.window_bytes(streams_gradients=True) for each in updates.of_each)
    lmswap.disable(model)


@pytest.mark.cpu_only("on a GPU it is reserved before the first one")
def test_an_update_of_what_is_resident_takes_what_is_planned():
    model = Layers(WHOLE)
    updates = updates_of(model, WHOLE)
    shares = shares_taken(model, updates, WHOLE)
    assert {name: share for name, share in shares.items() if not 0.99 < share <= 1.01} == {}
    session = session_of(model)
    program, budget = session.current_step().merged.program, session.budget
    planned_bytes = budget.unmoved(budget.allowance(program), program).update_bytes
    assert planned_bytes == updates.whole_bytes == 3 * WIDTH * WIDTH * 4
    lmswap.disable(model)


def layers():
    """Layers of 4 MiB, whose parameters take more than their activations."""
    return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024, bias=False))


def trained(make_optimizer, budget):
    """Train with an optimizer that is not given; return the peaks of steps, the last report, and the least budget."""
    gc.collect()  # an optimizer before this one: what is freed later would hide as much
    torch.compiler.reset()
    model = layers()
    optimizer = make_optimizer(model.parameters())
    lmswap.enable(model, budget, policy="none")
    peaks = []
    for _ in range(3):
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = lmswap.report(model)
        peaks.append(report.measured_peak_bytes)
    least_bytes = lmswap.least_budget(model)
    lmswap.disable(model)
    return peaks, report, least_bytes


class Noisy(optim.Optimizer):
    """An optimizer of another package, which takes what Adam does."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(1e-3 * (parameter.grad + torch.randn_like(parameter)))


@pytest.mark.cpu_only("on a GPU it is reserved before the first one")
@pytest.mark.usefixtures("resident")
@pytest.mark.parametrize(
    "make_optimizer",
    [
        optim.AdamW,
        lambda parameters: optim.Adam(parameters, foreach=True),
        lambda parameters: optim.SGD(parameters, 0.1),
        Noisy,
    ],
    ids=["adamw", "adam foreach", "sgd", "another package"],
)
def test_an_update_by_an_optimizer_that_is_not_given_is_within_the_least_budget(make_optimizer):
    _, _, least_bytes = trained(make_optimizer, "1GiB")
    peaks, report, _ = trained(make_optimizer, least_bytes)
    assert max(peaks) <= least_bytes
    if make_optimizer is not Noisy:  # whose state is assumed
        assert report.predicted_peak_bytes == pytest.approx(peaks[-1], rel=0.01)


@pytest.mark.cpu_only("on a GPU it is reserved before the first one")
@pytest.mark.usefixtures("resident")
def test_an_update_by_an_optimizer_that_is_yet_to_come_is_expected_until_steps_have_trained():
    model = lmswap.enable(layers(), "1GiB", policy="none")
    planned_bytes = []
    for _ in range(2):
        model(torch.randn(4, 1024)).square().mean().backward()
        program, budget = session_of(model).current_step().merged.program, session_of(model).budget
        planned_bytes.append(budget.allowance(program).update_bytes)
    assert planned_bytes == [3 * 2**22, 0]
    lmswap.disable(model)


@pytest.mark.cpu_only("on a GPU it is reserved before the first one")
@pytest.mark.usefixtures("resident")
def test_a_refusal_names_the_update_if_most_is_needed_there():
    model = layers()
    optimizer = optim.AdamW(model.parameters())
    lmswap.enable(model, "42MiB")
    with pytest.raises(PlanInfeasible) as refused:
        model(torch.randn(4, 1024)).square().mean().backward()
    assert refused.value.where == "the update of parameters"
    assert refused.value.live[0] == ("temporary values of the optimizer", 3 * 2**22)
    assert "a smaller batch or image cannot suffice" in " ".join(str(refused.value).split())
    assert not optimizer.state
    lmswap.disable(model)


@pytest.mark.cpu_only("on a GPU it is reserved before the first one")
def test_an_optimizer_that_small_copies_cannot_try_is_noted():
    model = layers()
    optimizer = optim.LBFGS(model.parameters())
    lmswap.enable(model, "1GiB", policy="none")

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 1024)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    (note,) = (each for each in lmswap.report(model).notes if "LBFGS" in each)
    assert note.startswith("temporary values of LBFGS count as none: small copies of its parameters could not")
    assert "'closure'" in note
    lmswap.disable(model)
