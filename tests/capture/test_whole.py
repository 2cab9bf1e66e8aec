"""Resampling is traced as the operators that eager torch runs, and so gives its bits."""

import pytest
import torch
from torch import nn

from lmswap.capture.whole import whole_operators
from tests.capture.captured import capture

MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}


@pytest.mark.parametrize(("mode", "num_sides"), [(mode, n) for mode, numbers in MODES.items() for n in numbers])
def test_resampling_is_one_operator_each_way_and_the_bits_are_those_of_eager_torch(mode, num_sides):
    model, example = nn.Upsample(scale_factor=2, mode=mode), torch.randn((2, 3, *[4] * num_sides), requires_grad=True)
    found = []
    recording, result = capture(model, example)
    for output in (result, model(example)):
        (gradient,) = torch.autograd.grad(output.square().sum(), example)
        found.append((output, gradient))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    forward, backward = ([op.name for op in graph.ops if op.op != "output"] for graph in recording.lowered[0].graphs)
    assert len(forward) == len(backward) == 1
    assert "upsample" in forward[0]
    assert "upsample" in backward[0]


def test_torch_traces_as_before_afterwards_also_after_an_error():
    op, key = torch.ops.aten.upsample_nearest3d.vec, torch._C.DispatchKey.CompositeImplicitAutograd
    kernel = op.py_kernels[key]
    with pytest.raises(KeyError), whole_operators():
        assert key not in op.py_kernels
        raise KeyError
    assert op.py_kernels[key] is kernel
