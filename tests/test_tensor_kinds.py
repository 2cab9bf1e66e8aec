"""Tensors without a storage of plain bytes, where a step saves them or its backward is given them: torch's bits."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

import lmswap
from lmswap.errors import DoubleBackward
from tests.training import same_bits

PATHS = ("fx", "eager")


def swapping(model, path, **options):
    return lmswap.enable(model, compiler=path, policy="swap_all", min_swap_bytes=256, **options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 48), nn.Linear(48, 8)

    def scores(self, x):
        return self.last(F.gelu(self.first(x)))


class Dual(Net):
    """Values and their derivatives along a direction: autograd saves zeros without memory as tangents of weights."""

    def forward(self, x):
        with forward_ad.dual_level():
            made = forward_ad.unpack_dual(self.scores(forward_ad.make_dual(x, x.cos())))
            return made.primal.sum() + made.tangent.square().sum()


class DualGroups(Net):
    """The same of a normalization, which torch 2.13 fails to trace: that left the thread without autograd."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 48)

    def forward(self, x):
        def scores(x):
            return self.last(torch.sigmoid(self.norm(self.first(x))))

        made, tangent = torch.func.jvp(scores, (x,), (torch.ones_like(x),))
        return made.sum() + tangent.square().sum()


class Jacobian(Net):
    """A penalty on the Jacobian of each sample, by forward mode under a vmap."""

    def forward(self, x):
        return torch.func.vmap(torch.func.jacfwd(self.scores))(x).square().sum()


class Keeping(torch.autograd.Function):
    """Saves one tensor, which its backward adds to the gradient."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        kept = kept.dequantize() if kept.is_quantized else kept.to_dense() if kept.is_sparse else kept
        return gradient * 2 + kept, None


class KeepsZeros(Net):
    def forward(self, x):
        return F.gelu(Keeping.apply(self.first(x), torch._efficientzerotensor((32, 48)))).square().sum()


class KeepsSparse(Net):
    def forward(self, x):
        return F.gelu(Keeping.apply(self.first(x), torch.eye(32, 48).to_sparse())).square().sum()


class KeepsQuantized(Net):
    def forward(self, x):
        hidden = self.first(x)
        return F.gelu(Keeping.apply(hidden, torch.quantize_per_tensor(hidden.detach(), 0.1, 0, torch.quint8))).sum()


def train(model):
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(32, 16))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def _on_cpus(kind):
    return pytest.param(kind, marks=pytest.mark.cpu_only("the emulated GPU has no kernels of such tensors"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind", [Dual, DualGroups, Jacobian, KeepsZeros, *map(_on_cpus, [KeepsSparse, KeepsQuantized])]
)
def test_tensors_without_plain_storage_stay_resident_with_plain_bits(kind, path):
    torch.compiler.reset()
    model = kind()
    enabled = swapping(copy.deepcopy(model), path)
    assert same_bits(train(enabled), train(model))
    assert lmswap.report(enabled).tier_highest_bytes > 0


class TwoOutputs(nn.Module):
    """Two outputs, a weight that is used twice, and draws."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 48), nn.LayerNorm(48)

    def forward(self, x):
        hidden = F.dropout(self.norm(torch.sigmoid(self.first(x))), 0.25)
        return F.linear(hidden, self.first.weight.t()), hidden.exp().t()


def rows_of_jacobian(model, which):
    """Some rows of the Jacobian of one output, or of both, all in one backward of batched gradients."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(8, 16, requires_grad=True)
        made = model(x)
        outputs = [made[position] for position in which]
        rows = [torch.randn(5, *output.shape) for output in outputs]
        found += torch.autograd.grad(outputs, [x, model.first.weight], rows, is_grads_batched=True)
    return found


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_batched_gradients_are_those_of_torch(which, path, verify):
    torch.compiler.reset()
    model = TwoOutputs()
    enabled = swapping(copy.deepcopy(model), path, verify=verify)
    assert same_bits(rows_of_jacobian(enabled, which), rows_of_jacobian(model, which))
    assert lmswap.report(enabled).tier_highest_bytes > 0
    verified = lmswap.report(enabled).verified
    if verify and path == "fx":
        assert "batch of gradients" in verified.not_beside_plain[0]


@pytest.mark.parametrize("path", PATHS)
def test_a_batched_gradient_that_a_hook_replaces_is_used(path):
    torch.compiler.reset()
    model = TwoOutputs()
    enabled = swapping(copy.deepcopy(model), path)

    def rows(model):
        x = torch.ones(8, 16, requires_grad=True)
        torch.manual_seed(0)
        output, _ = model(x)
        output.register_hook(lambda gradient: gradient * 3)
        return torch.autograd.grad(output, [x], torch.ones(4, *output.shape), is_grads_batched=True)

    assert same_bits(rows(enabled), rows(model))


@pytest.mark.parametrize("path", PATHS)
def test_batched_differentiable_gradients_are_torchs_under_hooks(path):
    torch.compiler.reset()
    model = TwoOutputs()
    enabled = swapping(copy.deepcopy(model), path)

    def penalty(model):
        torch.manual_seed(0)
        x = torch.randn(8, 16, requires_grad=True)
        output, _ = model(x)
        (rows,) = torch.autograd.grad(output, x, torch.ones(4, *output.shape), create_graph=True, is_grads_batched=True)
        return torch.autograd.grad(rows.square().sum(), [x, model.first.weight])

    if path == "fx":
        with pytest.raises(DoubleBackward, match="take the step again"):
            penalty(enabled)
    for _ in range(2):
        assert same_bits(penalty(enabled), penalty(model))
    assert lmswap.report(enabled).tier_highest_bytes > 0
