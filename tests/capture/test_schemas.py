"""Operators that do what their schemas do not say are refused by name; until then, what they might write stays."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._functorch import config

import lmswap
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


KINDS = {
    "writes": write,
    "shows": lambda x: x.view(x.shape),
    "doubles": lambda x: x * 2,
}


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = torch.library.Library("lmswap_tests", "DEF")
    for name, kernel in KINDS.items():
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
    with pytest.raises(CaptureError, match=f"lmswap_tests.{name}.default.*test_schemas.py.*{does}"):
        METER.costs(lowered.program, lowered.graphs)


def test_an_operator_with_a_right_schema_is_measured():
    recording, _ = capture(Calls("doubles"), torch.randn(5, 6))
    lowered = recording.lowered[0]
    assert METER.costs(lowered.program, lowered.graphs).source == "measured"


@pytest.mark.usefixtures("checked_by_torch")  # ours comes first
@pytest.mark.parametrize("name", ["writes", "shows"])
def test_a_model_that_calls_one_is_served_without_its_graph_and_says_so(name):
    torch.compiler.reset()
    model, batch = Calls(name), torch.randn(5, 6)
    expected = model(batch)
    lmswap.enable(model, policy="swap_all", budget="2GiB", min_swap_bytes=1)
    assert torch.equal(model(batch), expected)
    assert any(f"lmswap_tests.{name}" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)
