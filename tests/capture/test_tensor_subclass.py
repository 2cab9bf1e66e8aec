"""Inputs of a class that handles torch's functions train as plain tensors do, and outputs are of that class."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.tensor_subclass import has_torch_function
from tests.training import session_of


class Tagged(torch.Tensor):
    """As MONAI's MetaTensor: what an operator makes of it has its tag."""

    tag = ""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        tags = [value.tag for value in args if isinstance(value, Tagged)]
        if isinstance(made, Tagged) and tags:
            made.tag = max(tags)
        return made


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    def forward(self, x, *, scale):
        return self.layers(x) * scale


def tagged(x):
    x = x.as_subclass(Tagged)
    x.tag = "scan 7"
    return x


def step(model, x, scale):
    output = model(x, scale=scale)
    output.square().mean().backward()
    found = [output.detach().as_subclass(torch.Tensor), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return output, found


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_bits_are_plain_torchs_and_the_class_dresses_the_output(compiler):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x, scale = Scaled(), torch.randn(64, 64), torch.rand(64)
    _, expected = step(model, tagged(x), scale)
    lmswap.enable(
        model, "6GiB", policy="swap_all" if compiler == "fx" else "auto", min_swap_bytes=1024, compiler=compiler
    )
    for _ in range(3):
        output, found = step(model, tagged(x), scale)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert type(output) is Tagged and output.tag == "scan 7"
    if compiler == "fx":
        assert lmswap.report(model).swapped_out_bytes > 0
        step(model, x, tagged(scale))
        step(model, x, scale)
        assert len(session_of(model).graphs) == 1  # one for plain and for dressed tensors
    lmswap.disable(model)


class Bare(torch.Tensor):
    """A class that only has a name."""


def test_a_subclass_without_own_code_uses_graphs():
    torch.compiler.reset()
    model = Scaled()
    _, expected = step(model, torch.ones(64, 64).as_subclass(Bare), torch.ones(64))
    lmswap.enable(model, policy="swap_all", min_swap_bytes=1024)
    for _ in range(2):
        output, found = step(model, torch.ones(64, 64).as_subclass(Bare), torch.ones(64))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert type(output) is Bare
    assert lmswap.report(model).swapped_out_bytes > 0
    lmswap.disable(model)


def test_gradients_reach_inputs_of_that_class():
    model = lmswap.enable(Scaled(), "6GiB")
    x = torch.randn(8, 64, requires_grad=True)
    model(tagged(x), scale=torch.ones(64)).sum().backward()
    lmswap.disable(model)
    gradient = x.grad.clone()
    x.grad = None
    model(x, scale=torch.ones(64)).sum().backward()
    assert torch.equal(gradient.as_subclass(torch.Tensor), x.grad)


def test_torchs_own_kinds_of_tensors_are_left_alone():
    assert has_torch_function(tagged(torch.ones(2)))
    assert not any(
        map(has_torch_function, [torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2)), 1, None])
    )
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert not has_torch_function(jagged)
