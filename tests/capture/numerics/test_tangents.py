"""Gradients that enter a backward: recognized whatever names saved values have, and missing only in their backward."""

import pytest
import torch
from torch import nn

from lmswap.capture.aot import compile_region
from lmswap.ir.program import BufferKind
from lmswap.torch_compat.aot_autograd import tangents
from tests.capture.captured import Recording, capture


@torch.library.custom_op("lmswap_tests::tangents", mutates_args=())
def tangents_of(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


tangents_of.register_fake(torch.empty_like)
tangents_of.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_saved_value_of_an_operator_with_their_name_is_no_tangent():
    def step(x):
        y = tangents_of(x)
        z = tangents_of(y * y)
        return (z * z).sum().unsqueeze(0)

    recording, _ = capture(step, torch.randn(8, 8, requires_grad=True))
    (lowered,) = recording.lowered
    _, backward = lowered.graphs
    inputs = [node.name for node in backward.module.graph.find_nodes(op="placeholder")]
    assert [node.name for node in tangents(backward.module.graph)] == ["tangents_1"]
    assert {"tangents", "tangents_2"} <= {*inputs}  # as torch names the saved ones
    kinds = [buffer.kind for buffer in lowered.program.buffers]
    assert kinds.count(BufferKind.TANGENT) == 1


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x), self.second(x)


def test_a_missing_gradient_of_a_backward_that_never_ran_is_forgotten():
    torch.compiler.reset()
    model, x = TwoOutputs(), torch.randn(3, 4)
    compiled = torch.compile(model, backend=lambda m, i: compile_region(m, i, Recording()), dynamic=False)

    def fail(_):
        raise RuntimeError("before the backward")

    first, _ = compiled(x)
    first.grad_fn.register_prehook(fail)
    with pytest.raises(RuntimeError, match="before the backward"):
        first.sum().backward()
    first, second = compiled(x)
    (first.sum() + (0 * second).sum()).backward()
    assert model.second.weight.grad is not None  # zeros, as in eager mode
    assert not model.second.weight.grad.any()
