"""Quantized and low-precision weights, as of other packages: plain bits; what is swapped, and what is named as kept."""

import re

import pytest
import torch
from torch import nn

import lmswap
from tests.training import session_of
from tests.training_state.adapted import same

WIDTH = 64


class Quantized(torch.Tensor):
    """Rows of 8-bit numbers with a scale each, by which they are multiplied where they are used, as in torchao."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            where = {name: given for name, given in (kwargs or {}).items() if name == "device"}
            return cls(*(function(each, **where) for each in (args[0].values, args[0].scale)))

        def plain(value):
            return value.values * value.scale if isinstance(value, cls) else value

        return function(*map(plain, args), **(kwargs or {}))


class OfSubclass(nn.Module):
    """A layer whose frozen weight is a tensor subclass, under a trained one."""

    def __init__(self):
        super().__init__()
        values = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(Quantized(values, torch.rand(WIDTH, 1) / 128), requires_grad=False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.trained(x)), self.weight).square().mean()


class OfBuffer(nn.Module):
    """A frozen weight in a buffer of bytes, which an operator of another package reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8))
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.ops.lmswap_tests.half_bytes(torch.tanh(self.trained(x)), self.packed).square().mean()


@torch.library.custom_op("lmswap_tests::half_bytes", mutates_args=())
def half_bytes(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    low, high = packed & 15, packed >> 4
    weight = torch.stack([low, high], -1).flatten(1).to(x.dtype) - 8
    return x @ weight.t()


@half_bytes.register_fake
def _(x, packed):
    return x.new_empty(x.shape[0], packed.shape[0])


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _gradient(ctx, gradient):
    (packed,) = ctx.saved_tensors
    weight = torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(gradient.dtype) - 8
    return gradient @ weight, None


half_bytes.register_autograd(_gradient, setup_context=_save)


class OfFloats(nn.Module):
    """A frozen weight of 8-bit floats, which are computed with as wider ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.trained(x)).to(torch.bfloat16)
        return nn.functional.linear(x, self.weight.to(torch.bfloat16)).float().square().mean()


def run(kind, **options):
    torch.manual_seed(0)
    model = kind()
    if options:
        lmswap.enable(model, "1GiB", policy="swap_all", weights="swap", min_swap_bytes=1024, **options)
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(8, WIDTH)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen += [loss.detach(), model(x)]
    return model, [*seen, *(p.detach().clone() for p in model.trained.parameters())]


@pytest.mark.parametrize("kind", [OfSubclass, OfBuffer, OfFloats], ids=lambda kind: kind.__name__)
def test_bits_are_plain(kind):
    _, expected = run(kind)
    model, found = run(kind, verify=False)
    assert same(found, expected)
    lmswap.disable(model)


def test_what_a_frozen_tensor_subclass_wraps_is_swapped_by_plans():
    model, _ = run(OfSubclass, verify=False)
    session = session_of(model)
    assert session.engine.host_copies.find(model.weight.values.untyped_storage()) is not None
    step = session.current_step()
    assert "weight.values" in {step.merged.program.buffers[swap.buffer].name for swap in step.plan.swaps}
    assert isinstance(model.weight, Quantized)
    lmswap.disable(model)
    assert session.engine.host_copies.nbytes == 0


@pytest.mark.cpu_only("the emulated GPU has no sparse tensors")
def test_a_tensor_without_plain_bytes_stays_and_is_named_with_its_size():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.register_buffer("mask", torch.eye(WIDTH).to_sparse())
    lmswap.enable(model, "1GiB", weights="swap", min_swap_bytes=1024)
    report = " ".join(str(lmswap.report(model)).split())
    assert re.search(r"'mask' \([\d.]+ KiB\) is not swapped: it is a Tensor without plain bytes", report)
    lmswap.disable(model)


def test_eight_bit_floats_are_swapped():
    model, _ = run(OfFloats, verify=False)
    assert session_of(model).engine.host_copies.find(model.weight.untyped_storage()) is not None
