"""Gradients arrive in the order in which they do in plain torch, where hooks or other processes wait for them."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lmswap
from lmswap.ir import backward_parts
from tests.models import ResidualBlock

pytestmark = pytest.mark.cpu_only("the order is read off a trace, which knows no device")


class Tied(nn.Module):
    """Two weights are used twice, one of them directly by its operator, and one input trains too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mixed = nn.Embedding(16, 8), nn.Parameter(torch.randn(8, 8))
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(()))

    def forward(self, indices):
        x = torch.addmm(self.norm.bias, self.embedding(indices), self.mixed)
        x = torch.tanh(self.norm(x @ self.mixed) * self.scale)
        return F.linear(x, self.embedding.weight), x


def cases():
    yield "linear", lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), lambda: torch.randn(4, 8)
    yield "convolutions", lambda: ResidualBlock(3, 8, 2), lambda: torch.randn(2, 3, 8, 8)
    yield "attention", lambda: nn.TransformerEncoderLayer(16, 2, 32), lambda: torch.randn(4, 2, 16)
    yield "tied", Tied, lambda: torch.randint(0, 16, (6,))
    yield "recurrent", lambda: nn.LSTM(8, 8, 2), lambda: torch.randn(4, 2, 8)


@pytest.fixture(params=["alone", "together"])
def _processes(request, tmp_path):
    if request.param == "alone":
        yield
        return
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arrivals(make, inputs, *, is_enabled):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, arrived = make(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    if is_enabled:
        lmswap.enable(model, policy="swap_all", budget="2GiB", min_swap_bytes=1)
    for _ in range(2):
        outputs = model(inputs())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.square().mean() for output in outputs if isinstance(output, torch.Tensor)).backward()
    # They are the graph's own tensors, and no views that could not be detached.
    assert not any(parameter.grad._is_view() for parameter in model.parameters())
    if is_enabled:
        assert lmswap.program(model).ops
        lmswap.disable(model)
    return arrived


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["by and by", "at once"])
def _by_and_by(request, monkeypatch):
    monkeypatch.setattr(backward_parts, "_MIN_BYTES", 1 if request.param else 2**40)


@pytest.mark.usefixtures("_processes", "_by_and_by")
@pytest.mark.parametrize(("make", "inputs"), [pytest.param(*case[1:], id=case[0]) for case in cases()])
def test_gradients_arrive_in_the_order_of_plain_torch(make, inputs):
    expected = arrivals(make, inputs, is_enabled=False)
    assert arrivals(make, inputs, is_enabled=True) == expected
    assert len(expected) > 3


def noisy_gradients(*, is_late: bool, **options):
    """Gradients to which hooks add noise, in a model with ``options``, or a plain one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), []
    if options:
        lmswap.enable(model, min_swap_bytes=1, **options)
    for step in range(5):
        if step == (2 if is_late else 0):
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        model.zero_grad()
        model(torch.randn(64, 64)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    lmswap.disable(model)
    return found


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("compiler", ["fx", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hooks_that_draw_numbers_draw_those_of_plain_torch(compiler, is_late):
    expected = noisy_gradients(is_late=is_late)
    actual = noisy_gradients(is_late=is_late, policy="swap_all", compiler=compiler)
    if compiler == "inductor":  # which rounds otherwise
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected, strict=True))
    else:
        assert all(map(torch.equal, actual, expected))
