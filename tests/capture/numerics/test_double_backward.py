"""Gradients of a captured graph that are differentiated once more are refused, however torch makes them."""

import pytest
import torch

from lmswap.capture.numerics.double_backward import detect_double_backward
from lmswap.errors import DoubleBackward


class Compiled(torch.autograd.Function):
    """Named as AOTAutograd's; its gradient can be differentiated, or, as with torch 2.11, is like a constant."""

    is_differentiable: bool

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.set_grad_enabled(Compiled.is_differentiable):
            return gradient * x.exp()


@pytest.mark.parametrize("is_differentiable", [True, False])
def test_a_penalty_on_gradients_is_refused_and_never_left_out(monkeypatch, is_differentiable):
    monkeypatch.setattr(Compiled, "is_differentiable", is_differentiable, raising=False)
    monkeypatch.setattr("lmswap.runtime.codegen.is_captured", lambda node: "Compiled" in node.name())
    x = torch.rand(4, requires_grad=True)
    output = Compiled.apply(x)
    detect_double_backward([output], lambda: "not twice", lambda _: None)
    loss = output.sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(gradient, x.exp())
    with pytest.raises(DoubleBackward, match="not twice"):
        (loss + gradient.square().sum()).backward()
