"""Resampling is traced as the operators that eager torch runs, with bitwise identical results."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.numerics.no_decompositions import no_python_kernels
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
def test_resampling_is_one_operator_each_way_with_eager_bits(mode, num_sides):
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


class Normalized(nn.Module):
    """By ``norm``, or, where it is traced, by the operator that eager torch chooses for it on a GPU with cuDNN."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm = self.norm
        if not torch.compiler.is_compiling():
            return norm(x.tanh()).tanh()
        statistics = (norm.running_mean, norm.running_var, self.training)
        return torch.ops.aten.cudnn_batch_norm(x.tanh(), norm.weight, norm.bias, *statistics, norm.momentum, norm.eps)[
            0
        ].tanh()


@pytest.mark.cpu_only("an operator of a GPU is computed by a CPU's kernel")
@pytest.mark.parametrize(("tracks", "trains"), [(True, True), (True, False), (False, True)])
def test_cudnn_batch_norm_is_traced_as_the_dispatching_operator(tracks, trains):
    x, found = torch.randn(4, 8, 16, 16), []
    for is_traced in (False, True):
        model = Normalized(nn.BatchNorm2d(8, track_running_stats=tracks)).train(trains)
        if is_traced:
            lmswap.enable(model, budget="1GiB", policy="swap_all", min_swap_bytes=1)
        for _ in range(3):
            model(x).square().mean().backward()
        norm = model.norm
        found.append((norm.weight.grad, norm.bias.grad, *([norm.running_mean, norm.running_var] if tracks else ())))
    operator = "_batch_norm_with_update_functional" if trains else "_batch_norm_no_update"
    assert f"aten.{operator}.default" in {op.target for op in lmswap.program(model).ops}
    assert lmswap.report(model).swapped_out_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    lmswap.disable(model)


@pytest.mark.parametrize(
    ("op", "key"),
    [
        (torch.ops.aten.upsample_nearest3d.vec, torch._C.DispatchKey.CompositeImplicitAutograd),
        (torch.ops.aten.cudnn_batch_norm.default, torch._C.DispatchKey.Autograd),
    ],
)
def test_torch_traces_as_before_afterwards_also_after_an_error(op, key):
    kernel = op.py_kernels[key]
    with pytest.raises(KeyError), no_python_kernels():
        assert op.py_kernels.get(key) is not kernel
        raise KeyError
    assert op.py_kernels[key] is kernel
