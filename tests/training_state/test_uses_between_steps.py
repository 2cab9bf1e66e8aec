"""Whatever a caller does with swapped weights between steps, results are those of plain torch."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import lmswap
from lmswap.api import _session
from lmswap.errors import NotManaged

WIDTH = 24


class Small(nn.Module):
    """Two frozen layers, one of them used twice, between trained ones; a view of the first is used, too."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, 3)
        self.frozen.requires_grad_(False)
        self.wide.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.frozen(self.first(x)))
        x = torch.tanh(self.frozen(x)) + x @ self.frozen.weight[: WIDTH // 2].repeat(2, 1)
        return self.last(self.wide(x))


class Run:
    """A model in training, and what a caller holds of it."""

    def __init__(self, *, is_enabled: bool):
        torch.manual_seed(0)
        self.model = Small()
        if is_enabled:
            lmswap.enable(self.model, "1GiB", policy="swap_all", weights="swap", min_swap_bytes=512)
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.held: list[Any] = []
        self.seen: list[torch.Tensor] = []
        self.num_steps = 0

    def step(self):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(self.num_steps))
        self.num_steps += 1
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach())

    def look(self):
        self.seen += [p.detach().clone() for p in self.model.parameters()]
        self.seen += [torch.as_tensor(each).clone() for each in self.held]


def scale_data(run):
    run.model.frozen.weight.data.mul_(0.5)


def write_by_numpy(run):
    weight = run.model.wide.weight.detach()
    (weight if weight.is_cuda else weight.numpy())[3] = 0.25


def hold_numpy(run):
    weight = run.model.frozen.weight.detach()
    run.held.append(weight if weight.is_cuda else weight.numpy())


def write_to_what_is_held(run):
    for each in run.held:
        each[0] = 0.125


def release(run):
    run.held.clear()


def hold_detached(run):
    run.held.append(run.model.wide.weight.detach())


def hold_a_view(run):
    run.held.append(run.model.frozen.weight.data.t()[1:3])


def hold_a_state_dict(run):
    run.held += run.model.state_dict().values()


def copy_in_place(run):
    with torch.no_grad():
        run.model.frozen.weight.copy_(run.model.frozen.weight.flip(0))
        run.model.wide.weight[2:4] += 0.5


def replace_data(run):
    run.model.wide.weight.data = run.model.wide.weight.detach() * 0.75


def replace_parameter(run):
    weight = run.model.frozen.weight
    run.model.frozen.weight = nn.Parameter(weight.detach().clone().sin_(), requires_grad=False)


def as_a_vector(run):
    parameters = [run.model.frozen.weight, run.model.wide.weight]
    vector_to_parameters(parameters_to_vector(parameters).mul(0.9), parameters)


def load(run):
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})


def load_and_assign(run):
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    frozen = {name: value for name, value in state.items() if name.startswith(("frozen", "wide"))}
    run.model.load_state_dict(frozen, strict=False, assign=True)
    for layer in (run.model.frozen, run.model.wide):
        layer.requires_grad_(False)


def copy_the_model(run):
    with torch.no_grad():
        copied = copy.deepcopy(run.model.frozen)
        copied.weight.zero_()


def validate(run):
    with torch.no_grad():
        run.seen.append(run.model(torch.ones(2, WIDTH)))


def infer(run):
    with torch.inference_mode():
        run.seen.append(run.model(torch.ones(3, WIDTH)).clone())


def thaw(run):
    run.model.wide.requires_grad_(not run.model.wide.weight.requires_grad)
    run.model.wide.weight.grad = None


def clear_gradients(run):
    run.model.zero_grad()


def resize_storage_elsewhere(run):
    run.model.share_memory()


ACTIONS: list[Callable[[Run], None]] = [
    Run.step,
    Run.look,
    scale_data,
    write_by_numpy,
    hold_numpy,
    write_to_what_is_held,
    release,
    hold_detached,
    hold_a_view,
    hold_a_state_dict,
    copy_in_place,
    replace_data,
    replace_parameter,
    as_a_vector,
    load,
    load_and_assign,
    copy_the_model,
    validate,
    infer,
    thaw,
    clear_gradients,
    resize_storage_elsewhere,
]


def results(actions, *, is_enabled):
    run = Run(is_enabled=is_enabled)
    for action in (Run.step, *actions, Run.step, Run.look):
        action(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotManaged)  # of what is held
        lmswap.disable(run.model)
    run.look()
    return run.seen


def check(actions):
    found, expected = results(actions, is_enabled=True), results(actions, is_enabled=False)
    assert len(found) == len(expected)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_one_use_between_steps_gives_plain_bits(action):
    check([action])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=8))
def test_uses_between_steps_give_plain_bits(actions):
    check(actions)


def test_weights_are_in_their_host_copies_between_these_steps():
    run = Run(is_enabled=True)
    run.step()
    find = _session(run.model).engine.host_copies.find
    resident = [n for n, p in run.model.named_parameters() if find(p.untyped_storage()) is None]
    assert resident == ["first.weight", "first.bias", "frozen.bias", "last.weight", "last.bias"]
