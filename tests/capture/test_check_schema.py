"""Operators that do what their schemas do not say are refused by name; until then, what they might write stays."""

from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn
from torch._functorch import config

import lmswap
from lmswap.capture.check_schema import check_schema
from lmswap.errors import CaptureError
from tests.capture.captured import METER, capture

# Torch's own check of them refuses some, but only where the environment has a variable CI.
CHECKS = [name for name in ("check_custom_op_aliasing", "error_on_custom_op_aliasing") if hasattr(config, name)]


@pytest.fixture
def unchecked_by_torch():
    with config.patch(dict.fromkeys(CHECKS, False)) if CHECKS else nullcontext():
        yield


@pytest.fixture
def checked_by_torch():
    with config.patch(dict.fromkeys(CHECKS, True)) if CHECKS else nullcontext():
        yield


def write(x):
    memory = x.numpy()  # behind autograd's back, as foreign code does
    memory += 1
    return x.clone()


def free(x):
    doubled = x * 2
    x.untyped_storage().resize_(0)
    return doubled


def grow(x):
    x.untyped_storage().resize_(2 * x.untyped_storage().nbytes())
    return x * 2


def replace(x):
    doubled = x * 2
    x.data = torch.zeros_like(x)
    return doubled


KINDS = {
    "writes": write,
    "shows": lambda x: x.view(x.shape),
    "doubles": lambda x: x * 2,
}
MOVERS = {"frees": free, "grows": grow, "replaces": replace}


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = torch.library.Library("lmswap_tests", "DEF")
    for name, kernel in {**KINDS, **MOVERS}.items():
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, kernel, "CPU")
        torch.library.register_fake(f"lmswap_tests::{name}", lambda x: x.new_empty(x.shape), lib=library)
    yield
    library._destroy()


class Calls(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.layer = name, nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.layer(x).sigmoid()
        called = getattr(torch.ops.lmswap_tests, self.name)(hidden.detach())
        return called.sum() + (hidden * hidden).sum()


@pytest.mark.usefixtures("unchecked_by_torch")
@pytest.mark.parametrize("name", KINDS)
def test_a_foreign_operator_counts_as_a_writer_of_what_it_reads(name):
    recording, _ = capture(Calls(name), torch.randn(5, 6))
    (op,) = (op for op in recording.lowered[0].program.ops if name in op.target)
    assert set(op.reads) <= set(op.writes)
    assert len(op.writes) == 2


@pytest.mark.usefixtures("unchecked_by_torch")
@pytest.mark.parametrize(("name", "does"), [("writes", "writes its argument 'x'"), ("shows", "returns memory")])
def test_an_operator_with_a_wrong_schema_is_refused_by_name_and_line(name, does):
    recording, _ = capture(Calls(name), torch.randn(5, 6))
    lowered = recording.lowered[0]
    with pytest.raises(CaptureError, match=f"lmswap_tests.{name}.default.*test_check_schema.py.*{does}"):
        METER.costs(lowered.program, lowered.graphs)


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("frees", "resizes the storage of its argument 'x' from 120 to 0 bytes"),
        ("grows", "resizes the storage of its argument 'x' from 120 to 240 bytes"),
        ("replaces", "replaces the storage of its argument 'x'"),
    ],
)
def test_an_operator_that_moves_an_arguments_memory_is_refused(name, does):
    graph = fx.Graph()
    node = graph.call_function(getattr(torch.ops.lmswap_tests, name).default, (graph.placeholder("x"),))
    with pytest.raises(CaptureError, match=does):
        check_schema(node, (torch.ones(5, 6),), {})


def test_an_operator_with_a_right_schema_is_measured():
    recording, _ = capture(Calls("doubles"), torch.randn(5, 6))
    lowered = recording.lowered[0]
    assert METER.costs(lowered.program, lowered.graphs).source == "measured"


@pytest.mark.usefixtures("checked_by_torch")  # ours comes first
@pytest.mark.parametrize("name", ["writes", "shows"])
def test_a_model_that_calls_one_runs_without_its_graph_which_is_reported(name):
    torch.compiler.reset()
    model, batch = Calls(name), torch.randn(5, 6)
    expected = model(batch)
    lmswap.enable(model, policy="swap_all", budget="2GiB", min_swap_bytes=1)
    assert torch.equal(model(batch), expected)
    assert any(f"lmswap_tests.{name}" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)


class Coupling(torch.autograd.Function):
    """An invertible block: its input's memory is freed in the forward and filled again in the backward."""

    @staticmethod
    def forward(ctx, x, scale):
        y = x * scale.exp()
        ctx.save_for_backward(x, y, scale)
        x.untyped_storage().resize_(0)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y, scale = ctx.saved_tensors
        x.untyped_storage().resize_(y.untyped_storage().nbytes())
        x.copy_(y * (-scale).exp())
        return grad * scale.exp(), (grad * y).sum(0)


class Invertible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(16, 16), nn.Linear(16, 4), nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.last(Coupling.apply(self.first(x), self.scale))


class ReusesMemory(nn.Module):
    """Frees a buffer of its own between two uses."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        work = x.detach() * 3
        total = work.sum()
        nbytes = work.untyped_storage().nbytes()
        work.untyped_storage().resize_(0)
        work.untyped_storage().resize_(nbytes)
        work.copy_(x)
        return self.layer(x) * work.mean() + total


@pytest.mark.parametrize("make", [Invertible, ReusesMemory])
def test_a_model_that_resizes_storages_is_reported_and_uses_hooks(make):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, batch = make(), torch.randn(8, 16)

    def gradients():
        model.zero_grad()
        model(batch).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    lmswap.enable(model, policy="swap_all", budget="2GiB", min_swap_bytes=1)
    for _ in range(3):
        assert all(map(torch.equal, gradients(), expected))
    assert any("resizes the storage" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)
