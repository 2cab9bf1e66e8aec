"""Architectures drawn at random, and two that newcomers start with.

Drawn are convolutional and residual ones, U-Nets in 2D and 3D, encoders, mixers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

_NORMS = ("batch", "group", "none")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "leaky": nn.LeakyReLU}
_CONV: dict[int, type[nn.Module]] = {2: nn.Conv2d, 3: nn.Conv3d}
_BATCH_NORM: dict[int, type[nn.Module]] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOL: dict[int, Callable[[Tensor, int], Tensor]] = {2: nn.functional.max_pool2d, 3: nn.functional.max_pool3d}


@dataclass(frozen=True)
class Network:
    """A drawn architecture: what it is for people, and how it and a batch are made."""

    description: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def network_called(name: str) -> Network:
    """The network of `NAMED` called ``name``, or that which is drawn for the seed ``name``."""
    return NAMED[name]() if name in NAMED else draw(int(name))


def draw(seed: int) -> Network:
    """The network of ``seed``, whose step takes some 50 to 600 MiB."""
    source = random.Random(seed)
    family, make, shape = source.choice((_convolutional, _unet, _encoder, _mixer))(source)
    name = source.choice(("sgd", "momentum", "adam"))
    return Network(f"{family}, {name}, batch {tuple(shape)}", make, lambda: torch.randn(shape), _OPTIMIZERS[name])


_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3),
}
_Drawn = tuple[str, Callable[[], nn.Module], tuple[int, ...]]


class _Block(nn.Module):
    """Convolutions with norm and activation, perhaps with a way around them."""

    def __init__(self, dims: int, channels: tuple[int, int], norm: str, activation: str, *, is_residual: bool) -> None:
        super().__init__()
        before, after = channels
        layers: list[nn.Module] = []
        for entering in (before, after):
            layers.append(_CONV[dims](entering, after, 3, padding=1))
            if norm != "none":
                layers.append(_BATCH_NORM[dims](after) if norm == "batch" else nn.GroupNorm(4, after))
            layers.append(_ACTIVATIONS[activation]())
        self.layers = nn.Sequential(*layers)
        self.around = _CONV[dims](before, after, 1) if is_residual else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y if self.around is None else y + self.around(x)


def _convolutional(source: random.Random) -> _Drawn:
    width, depth, side = source.choice((16, 24, 32)), source.randint(3, 8), source.choice((64, 96, 112))
    norm, activation, is_residual = source.choice(_NORMS), source.choice([*_ACTIVATIONS]), source.random() < 0.5

    def make() -> nn.Module:
        block = partial(_Block, 2, (width, width), norm, activation, is_residual=is_residual)
        blocks = [block() for _ in range(depth)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)

    kind = f"{depth} {'residual' if is_residual else 'plain'} blocks of {width} channels, {norm} norm, {activation}"
    return kind, make, (source.randint(2, 6), 3, side, side)


class _UNet(nn.Module):
    def __init__(self, dims: int, widths: tuple[int, ...], norm: str, activation: str) -> None:
        super().__init__()
        self.dims = dims
        block = partial(_Block, dims, norm=norm, activation=activation, is_residual=False)
        self.down = nn.ModuleList(map(block, [(1, widths[0]), *pairwise(widths)]))
        self.up = nn.ModuleList(block((low + high, low)) for low, high in [*pairwise(widths)][::-1])
        self.head = _CONV[dims](widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else _POOL[self.dims](x, 2))
            skipped.append(x)
        skipped.pop()
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skipped.pop()], dim=1))
        y: Tensor = self.head(x)
        return y


def _unet(source: random.Random) -> _Drawn:
    dims = source.choice((2, 3))
    base, levels = source.choice((8, 12, 16)), source.randint(2, 4)
    side = source.choice((128, 160, 192) if dims == 2 else (32, 40, 48))
    norm, activation = source.choice(_NORMS), source.choice([*_ACTIVATIONS])
    widths = tuple(base * 2**level for level in range(levels))
    kind = f"{dims}D U-Net of {'-'.join(map(str, widths))} channels, {norm} norm, {activation}"
    shape = (source.randint(1, 3), 1, *(side // 8 * 8,) * dims)
    return kind, lambda: _UNet(dims, widths, norm, activation), shape


def _encoder(source: random.Random) -> _Drawn:
    width, heads, depth = source.choice((128, 192, 256)), source.choice((2, 4, 8)), source.randint(2, 8)
    dropout, is_first = source.choice((0.0, 0.1)), source.random() < 0.5

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=is_first
        )
        return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    order = "norms first" if is_first else "norms last"
    kind = f"encoder of {depth} layers, {width} wide, {heads} heads, dropout {dropout:g}, {order}"
    return kind, make, (source.randint(1, 4), source.choice((128, 192, 256)), width)


class _Mixing(nn.Module):
    """Mixes tokens, then channels, as MLP-Mixer does."""

    def __init__(self, tokens: int, width: int, activation: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens, self.channels = (
            nn.Sequential(nn.Linear(size, 2 * size), _ACTIVATIONS[activation](), nn.Linear(2 * size, size))
            for size in (tokens, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        x = x + self.tokens(first(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.channels(second(x))
        return y


def _mixer(source: random.Random) -> _Drawn:
    tokens, width, depth = source.choice((128, 256)), source.choice((192, 256, 384)), source.randint(4, 10)
    activation = source.choice([*_ACTIVATIONS])
    kind = f"mixer of {depth} layers, {tokens} tokens, {width} wide, {activation}"
    make = lambda: nn.Sequential(*(_Mixing(tokens, width, activation) for _ in range(depth)))  # noqa: E731
    return kind, make, (source.randint(4, 12), tokens, width)


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        attending, mixing = self.norms
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(attending(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(mixing(x))
        return y


class _Gpt(nn.Module):
    """A decoder as a course has it: learned positions, causal attention, norms first."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_GptBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        y: Tensor = self.head(self.norm(self.blocks(x)))
        return y


def _gpt() -> Network:
    return Network(
        "GPT of 12 layers, 384 wide, 6 heads, adam, batch (8, 256)",
        lambda: _Gpt(512, 256, 384, 12, 6),
        lambda: torch.randint(0, 512, (8, 256)),
        _OPTIMIZERS["adam"],
    )


def _monai_unet() -> Network:
    from monai.networks.nets import UNet  # noqa: PLC0415 - of the extra "conformance"

    return Network(
        "MONAI's UNet of 16-32-64-128-256 channels, 2 residual units, adam, batch (1, 1, 64, 64, 64)",
        lambda: UNet(3, 1, 3, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2), num_res_units=2),
        lambda: torch.randn(1, 1, 64, 64, 64),
        _OPTIMIZERS["adam"],
    )


NAMED: dict[str, Callable[[], Network]] = {"gpt": _gpt, "monai_unet": _monai_unet}
