"""Small models that between them have what makes capture hard; each comes with a batch and a loss.

Nothing is there more often than it takes: a test spends its time in torch's tracing, which takes as long as there are
ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.unet3d.network import DecoderLevel, EncoderLevel
from lmswap.reporting import Report


class ShallowUNet3d(nn.Module):
    """Two of the five levels of the benchmark's network, which have all its kinds of ops in a third of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            [EncoderLevel(4, 8, stride=1, dropout=0.3), EncoderLevel(8, 16, stride=2, dropout=0.3)]
        )
        self.decoder = DecoderLevel(16, 8)
        self.heads = nn.ModuleList([nn.Conv3d(16, 3, 1), nn.Conv3d(8, 3, 1)])
        self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.encoder[0](x)
        deep = self.encoder[1](skip)
        logits = self.enlarge(self.heads[0](deep)) + self.heads[1](self.decoder(deep, skip))
        return torch.sigmoid(logits)


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class ResNet(nn.Module):
    """Residual blocks, batch norm with running statistics, in-place ops, channels_last on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        return self.head(self.blocks(y).mean((2, 3)))


class Encoder(nn.Module):
    """A transformer encoder with embedding, attention, layer norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class SharedViews(nn.Module):
    """Shared weights, views of one storage saved by several ops, detach, in-place writes, outputs that alias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        left, right = h.chunk(2, dim=1)
        mixed = torch.cat([left * right, right.detach() * left.t().t()], 1)
        mixed.mul_(h.view(2, -1, 64).sum(0, keepdim=True).expand(2, -1, -1).reshape(-1, 64).sigmoid())
        mixed[:, 0] = 1.0
        deep = torch.tanh(self.second(mixed)) * torch.exp(-mixed)
        out = F.gelu(deep).unsqueeze(0)
        return out, out[0, :, :32]


class Broken(nn.Module):
    """Three graphs in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.a(x)).exp()
        torch._dynamo.graph_break()
        x = torch.tanh(self.b(x)).exp()
        torch._dynamo.graph_break()
        return torch.tanh(self.c(x)).exp()


class BrokenBlock(nn.Module):
    """Breaks in the middle: where a model has several, torch makes two graphs of them that run for each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x):
        x = torch.tanh(self.a(x)).exp()
        torch._dynamo.graph_break()
        return torch.tanh(self.b(x)).exp()


class UntrainedMiddle(nn.Module):
    """Between two graphs that train runs one that has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x):
        x = torch.tanh(self.a(x)).exp()
        torch._dynamo.graph_break()
        weights = torch.arange(128.0).cos()
        torch._dynamo.graph_break()
        return torch.tanh(self.b(x * weights)).exp()


class Chain(nn.Module):
    """A chain of tensors of 1 MiB, of which each is saved: the heap that counts bytes serves from 1 MiB on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(x * self.scale)
        return x


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]

    def loss(self, output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        tensors = output if isinstance(output, tuple) else (output,)
        return sum(((tensor.float() ** 2).mean() for tensor in tensors), torch.zeros(()))


CASES = {
    "unet3d": Case(ShallowUNet3d, lambda: torch.randn(1, 4, 32, 32, 32)),
    "resnet": Case(ResNet, lambda: torch.randn(4, 3, 64, 64)),
    "resnet_channels_last": Case(
        lambda: ResNet().to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last),
    ),
    "encoder": Case(Encoder, lambda: torch.randint(0, 50, (4, 96))),
    "shared_views": Case(SharedViews, lambda: torch.randn(256, 64)),
}
CHAIN = Case(Chain, lambda: torch.randn(512, 512))
# Its step holds some 100 MiB, so that a budget is distinguishable from the growth of the process.
LARGE = Case(CASES["resnet"].make, lambda: torch.randn(16, 3, 192, 192))


# The parameter of tests that run compilers.
INDUCTOR = pytest.param(
    "inductor",
    marks=[pytest.mark.slow, pytest.mark.real_gpu("Inductor's kernels are Triton's, which are not emulated")],
)


def quick_of(cases: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """All ``cases`` as a test's parameters; those in ``quick`` run on each change, the others in `make test-all`."""
    cases = list(cases)
    assert all(case in cases for case in quick), "what is to run on each change is no case"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (case not in quick))
        for case in cases
    ]


def tight_budget(unplanned: Report, share: float = 0.85) -> int:
    """A budget that lets a step hold ``share`` of what it holds ``unplanned``."""
    if unplanned.device.startswith("cuda"):
        share = max(share, 0.99)  # of LARGE's arena on a GPU, the places of its largest op take 95 to 98 %
    fixed_bytes = unplanned.base_bytes + unplanned.reserve_bytes
    return fixed_bytes + unplanned.margin_bytes + int(share * (unplanned.predicted_peak_bytes - fixed_bytes))
