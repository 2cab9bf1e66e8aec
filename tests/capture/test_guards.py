"""Changes between steps take effect in the next one: captured graphs stay bitwise equal to plain torch."""

import random
import subprocess
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parametrizations, parametrize

import lmswap
from lmswap.capture.recompiles import MAX_GRAPHS, TRACING
from lmswap.errors import ManyTraces, OptionError
from lmswap.torch_compat.symbolic_sizes import SymbolicRegion
from tests.both_paths import swapping
from tests.models import INDUCTOR, quick_of
from tests.training import session_of

FACTOR = 1.0


class Attention(nn.Module):
    """Attention, a norm and dropout, with all that a trace could take for granted."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.act, self.drop, self.norm = nn.Tanh(), nn.Dropout(0.1), nn.BatchNorm1d(8)
        self.scale, self.settings = 1.0, {"gain": 1.0}
        self.register_buffer("bias", torch.ones(()))

    def forward(self, x):
        y = self.drop(self.act(self.into(x))) * self.scale * self.settings["gain"] * FACTOR
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return self.out(self.norm(y)) + self.bias


def doubled(_module, _given, made):
    return made * 2


def set_to(owner, name, value):
    """Sets an attribute, and gives what sets it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def set_gain(model):
    model.settings["gain"] = 2.0
    return lambda: model.settings.update(gain=1.0)


def give_forward(model):
    model.act.forward = lambda x: x.sigmoid()
    return lambda: delattr(model.act, "forward")


def normalize(model):
    parametrizations.weight_norm(model.out)
    return lambda: parametrize.remove_parametrizations(model.out, "weight")


def allow_no_flash(_model):
    before = torch.backends.cuda.flash_sdp_enabled()  # an emulated GPU has none
    torch.backends.cuda.enable_flash_sdp(False)
    return lambda: torch.backends.cuda.enable_flash_sdp(before)


CHANGES = {
    "hook": lambda model: model.act.register_forward_hook(doubled).remove,
    "hook_of_the_model": lambda model: model.register_forward_hook(doubled).remove,
    "hook_before": lambda model: model.act.register_forward_pre_hook(lambda _, given: given[0] * 2).remove,
    "hook_in_backward": lambda model: model.act.register_full_backward_hook(lambda _, g, __: (g[0] * 2,)).remove,
    "hook_of_all": lambda _: (
        register_module_forward_hook(lambda module, _, made: made * 2 if isinstance(module, nn.Tanh) else None).remove
    ),
    "hook_of_all_in_backward": lambda _: (
        register_module_full_backward_hook(
            lambda module, given, _: (given[0] * 2,) if isinstance(module, nn.Tanh) else None
        ).remove
    ),
    "hook_of_a_weight": lambda model: model.out.weight.register_hook(lambda gradient: gradient * 2).remove,
    "attribute": lambda model: set_to(model, "scale", 2.0),
    "item": set_gain,
    "global": lambda _: set_to(sys.modules[__name__], "FACTOR", 2.0),
    "module": lambda model: set_to(model, "act", nn.Sigmoid()),
    "forward": give_forward,
    "dropout": lambda model: set_to(model.drop, "p", 0.5),
    "momentum": lambda model: set_to(model.norm, "momentum", 0.5),
    "eval": lambda model: set_to(model.norm, "training", False),
    "buffer": lambda model: set_to(model, "bias", torch.full((), 3.0)),
    "tied": lambda model: set_to(model.out, "weight", model.into.weight),
    "frozen": lambda model: set_to(model.into.weight, "requires_grad", False),
    "parametrized": normalize,
    "kernels": allow_no_flash,
    "dtype": lambda model: model.double().float,
}


def trained(change, *, managed):
    """Losses, gradients and buffers of six steps; ``change`` holds in the third and fourth."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, found = Attention(), []
    if managed:
        swapping(model, "fx")
    optimizer, undo = torch.optim.SGD(model.parameters(), lr=0.1), None
    for step in range(6):
        if step == 2:
            undo = change(model)
        if step == 4:
            undo()
        torch.manual_seed(step)
        data = torch.randn(64, 8, 32, dtype=model.bias.dtype, requires_grad=True)  # hooks of all would warn without
        loss = model(data).square().mean()
        loss.backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        found += [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]
        optimizer.step()
        optimizer.zero_grad()
    moved = lmswap.report(model).tier_highest_bytes if managed else 0
    lmswap.disable(model)
    return found, moved


# One of each way in which Dynamo may come to know of it.
QUICK = [
    "hook",
    "hook_of_all_in_backward",
    "hook_of_a_weight",
    "attribute",
    "global",
    "module",
    "eval",
    "tied",
    "frozen",
]


@pytest.mark.parametrize("change", quick_of(CHANGES, QUICK))
def test_changes_between_steps_take_effect(change):
    expected, _ = trained(CHANGES[change], managed=False)
    actual, moved = trained(CHANGES[change], managed=True)
    assert moved > 0
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class WithNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x):
        waves = numpy.sin(numpy.arange(64, dtype=numpy.float32) / 10000.0 ** (numpy.arange(64) / 64))
        noise = numpy.random.randn(*x.shape) * 0.1
        return self.layers(x + torch.from_numpy(noise + waves).to(x))


def test_numpy_in_a_model_stays_numpy_and_draws_what_it_draws():
    found = []
    for manage in (lambda model: model, lambda model: swapping(model, "fx")):
        torch.manual_seed(0)
        numpy.random.seed(0)
        model, data = manage(WithNumpy()), torch.randn(64, 64)
        for _ in range(3):
            loss = model(data).square().mean()
            loss.backward()
        found.append([loss.item(), numpy.random.rand(), *(p.grad.sum().item() for p in model.parameters())])
        lmswap.disable(model)
    assert found[0] == found[1]


class Growing(nn.Module):
    """Decodes token by token: each call sees a longer cache, which it keeps."""

    def __init__(self):
        super().__init__()
        self.take, self.give = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens, cache=None):
        seen = self.take(tokens)
        cache = seen if cache is None else torch.cat([cache, seen], 1)
        return torch.tanh(self.give(cache.softmax(1).sum(1, keepdim=True) + tokens)), cache


@pytest.mark.parametrize("compiler", ["fx", INDUCTOR])
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_are_plain_and_use_no_trace(compiler, without_gradients):
    def decode(model):
        with without_gradients():
            tokens, cache = torch.ones(2, 1, 16), None
            for _ in range(MAX_GRAPHS + 8):
                tokens, cache = model(tokens, cache)
        return tokens

    torch.compiler.reset()
    torch.manual_seed(0)
    model = Growing()
    expected = decode(model)
    swapping(model, compiler)
    traced = counters["frames"]["total"]
    assert torch.equal(decode(model), expected)
    assert counters["frames"]["total"] == traced
    for length in (3, 4):
        model(torch.ones(2, length, 16))[0].square().mean().backward()
    assert torch.equal(decode(model), expected)
    assert "instead of torch.compile" not in " ".join(lmswap.report(model).notes)
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_without_gradients_equals_plain_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
    model, data = nn.TransformerEncoder(layer, 2), torch.randn(8, 16, 32)
    hidden = torch.arange(16)[None] >= torch.arange(4, 12)[:, None]
    with torch.no_grad():
        expected = model.eval()(data, src_key_padding_mask=hidden)
    swapping(model, "fx").train()
    model(data, src_key_padding_mask=hidden).square().mean().backward()
    with torch.no_grad():
        assert torch.equal(model.eval()(data, src_key_padding_mask=hidden), expected)
    lmswap.disable(model)


def with_another_integer_in_each(model):
    """The losses of nine steps."""
    losses, data = [], torch.randn(64, 8, 32)
    for step in range(9):
        model.scale = 1 + step
        torch.manual_seed(step)
        loss = model(data).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_an_integer_that_changes_in_each_step_is_reported_and_uses_hooks(monkeypatch):
    torch.compiler.reset()
    for name in ("lmswap.capture.recompiles.MAX_GRAPHS", "lmswap.session.hooked_calls.MAX_GRAPHS"):
        monkeypatch.setattr(name, 6)
    monkeypatch.setitem(TRACING, "recompile_limit", 6)
    torch.manual_seed(0)
    expected = with_another_integer_in_each(Attention())
    torch.manual_seed(0)
    model = swapping(Attention(), "fx")
    message = r"5 times .* same shapes; the last trace was needed since '.*scale == .*a tensor"
    with pytest.warns(ManyTraces, match=message):
        assert with_another_integer_in_each(model) == expected
    assert any("it was traced 6 times" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)


class Expert(nn.Module):
    """Code that several experts share, captured by itself: graphs break where tokens are assigned to them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, out, token, place, weights):
        own = self.down(torch.tanh(self.up(x[token]))) * weights[token, place, None]
        return out.index_add(0, token, own)


class Experts(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.route, self.experts = nn.Linear(16, num_experts), nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x):
        weights, chosen = self.route(x).softmax(-1).topk(1, -1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            out = expert(x, out, *torch.where(chosen == number), weights)
        return out


def routed(model, num_steps=4):
    """Losses and gradients of steps that route other tokens to each expert."""
    torch.manual_seed(1)
    found = []
    for _ in range(num_steps):
        loss = model(torch.randn(64, 16)).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces")
@pytest.mark.parametrize(
    "limit",
    [
        "traces of a function",
        pytest.param("sizes of a region", marks=pytest.mark.cpu_only("a GPU's sizes are traced one by one")),
    ],
)
def test_a_limit_that_is_reached_within_a_call_ends_no_training_and_what_was_traced_is_freed(limit, monkeypatch):
    torch.compiler.reset()
    if limit == "traces of a function":
        monkeypatch.setattr("lmswap.capture.recompiles.MAX_GRAPHS", 2)
        monkeypatch.setitem(TRACING, "recompile_limit", 2)
    else:
        monkeypatch.setattr("lmswap.session.graph_capture.MAX_GRAPHS", 1)
        monkeypatch.setattr(SymbolicRegion, "serves", lambda *_: False)
    torch.manual_seed(0)
    expected = routed(Experts(3))
    torch.manual_seed(0)
    model = swapping(Experts(3), "fx")
    routed(model, 1)
    traced = [weakref.ref(graph._compiled) for graph in session_of(model).graphs]
    assert all(map(torch.equal, routed(model), expected))
    assert any("the limit" in note for note in lmswap.report(model).notes)
    assert traced
    assert not any(reference() for reference in traced)
    lmswap.disable(model)


def test_enabling_draws_no_random_number_of_pythons():
    random.seed(0)
    model = swapping(Attention(), "fx")
    model(torch.randn(64, 8, 32)).square().mean().backward()
    str(lmswap.report(model))
    str(lmswap.explain(model))
    lmswap.disable(model)
    assert random.random() == random.Random(0).random()


@pytest.mark.slow
def test_imports_at_the_first_use_in_a_process_draw_no_random_numbers():
    script = "import random, lmswap; random.seed(0); lmswap.enable; lmswap.profile; print(random.random())"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert float(run.stdout) == random.Random(0).random()


def test_a_model_that_is_moved_elsewhere_is_refused():
    model = swapping(Attention(), "fx")
    model.to("meta")
    with pytest.raises(OptionError, match=r"enabled on \S+ and lies on meta now: move it first, and then"):
        model(torch.randn(64, 8, 32, device="meta"))
    lmswap.disable(model)
