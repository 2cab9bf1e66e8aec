"""Models whose code torch's compiler cannot read, or fails on, train all the same."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder

import lmswap
from lmswap.capture.recompiles import TRACING, tracing_settings


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).exp())


class Doubling:
    """A callable that is no function."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, x):
        return self.forward(x) * 2


def doubled(forward, x):
    return forward(x) * 2


FORWARDS = {
    "a partial": lambda forward: functools.partial(doubled, forward),
    "a partial of a partial": lambda forward: functools.partial(functools.partial(doubled), forward),
    "an object": Doubling,
    "a cached function": lambda forward: functools.lru_cache(functools.partial(doubled, forward)),
    "a module": lambda forward: nn.Sequential(nn.Linear(32, 8, bias=False)),
    "a lambda": lambda forward: lambda x: doubled(forward, x),
}


def train(model):
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(48, 32)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def assert_trains_as_plain(model, plain, path="fx"):
    torch.compiler.reset()
    lmswap.enable(model, policy="swap_all", min_swap_bytes=256, compiler=path)
    found, expected = train(model), train(plain)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    report = lmswap.report(model)
    lmswap.disable(model)
    return report


@pytest.mark.parametrize("path", ["fx", "eager"])
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_that_is_no_method_trains(kind, path):
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        torch.manual_seed(2)
        object.__setattr__(each, "forward", FORWARDS[kind](each.forward))
    assert_trains_as_plain(model, plain, path)


@pytest.mark.parametrize("error", [AssertionError, KeyError, NotImplementedError, RecursionError])
def test_a_model_that_the_compiler_fails_on_uses_hooks_with_a_note(error, monkeypatch):
    model = Net()
    plain = copy.deepcopy(model)

    def fail(*_):
        raise error("of the compiler's own")

    monkeypatch.setattr(VariableBuilder, "__call__", fail)
    report = assert_trains_as_plain(model, plain)
    (note,) = [note for note in report.notes if note.startswith("path:")]
    assert "of the compiler's own" in note
    assert report.swapped_out_bytes > 0


def test_dynamo_settings_of_a_call_are_restored_however_it_ends():
    config = torch._dynamo.config
    before = {name: getattr(config, name) for name in TRACING}
    assert before != TRACING

    def call():
        with tracing_settings():
            assert {name: getattr(config, name) for name in TRACING} == TRACING
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call()
    assert {name: getattr(config, name) for name in TRACING} == before


def test_guards_are_not_timed_which_would_take_memory_of_the_budget(monkeypatch):
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: pytest.fail("timed"))
    torch.compiler.reset()
    model = lmswap.enable(nn.Linear(8, 8), "2GiB")
    model(torch.ones(2, 8)).sum().backward()
    assert lmswap.report(model).steps == 1
    lmswap.disable(model)
