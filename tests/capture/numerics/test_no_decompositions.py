"""Resampling is traced as the operators that eager torch runs, and so gives its bits; what is not is known by name."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.numerics.no_decompositions import ROUNDED_OTHERWISE, no_python_kernels, numerics_note
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
def test_cudnn_batch_norm_is_traced_as_the_dispatching_operator_with_its_mutations(tracks, trains):
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


ROUNDED = {
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, x[0, 0]),
    "unsafe_split": lambda x: x.unsafe_split(2, 1)[0],
}


def said_of(function) -> str | None:
    recording, _ = capture(lambda x: function(x.tanh()), torch.rand(4, 6, requires_grad=True))
    return numerics_note(recording.lowered[0])


@pytest.mark.parametrize("name", ROUNDED)
def test_operators_that_no_trace_reproduces_are_named(name):
    sentence = said_of(ROUNDED[name])
    assert sentence.startswith(f"{ROUNDED_OTHERWISE}: aten.{name}: ")


@pytest.mark.parametrize(
    "function", [lambda x: x.max(1)[0], lambda x: x.masked_fill(x > 0.5, 2.0), lambda x: x.cumsum(1)]
)
def test_no_note_on_operators_that_equal_eager_torch_bitwise(function):
    assert said_of(function) is None


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Halves(nn.Module):
    """Reads its input twice, as it may: that is no weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.one(x) + self.other(x)


@pytest.mark.parametrize(("model", "is_named"), [(Shared(), True), (Halves(), False)])
def test_a_weight_that_autocast_casts_more_than_once_is_named(model, is_named):
    with torch.autocast("cpu", torch.bfloat16):
        recording, _ = capture(model, torch.rand(4, 6))
    sentence = numerics_note(recording.lowered[0])
    assert (sentence or "").startswith(f"{ROUNDED_OTHERWISE}: _to_copy: eager torch casts a weight once") == is_named
