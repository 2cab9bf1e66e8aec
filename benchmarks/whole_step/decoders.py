"""Decoders with checkpointed blocks that return their loss: models whose whole step is planned, never allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANK = 16  # of adapters


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder; ``kv_heads`` share their keys and values among the other heads."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int


SIZES = {
    "tiny": Sizes(2, 128, 256, 4, 2, 512),
    "1b": Sizes(22, 2048, 5632, 32, 4, 32_000),
    "7b": Sizes(32, 4096, 11008, 32, 32, 32_000),
    "14b": Sizes(48, 5120, 13_824, 40, 8, 152_064),
}


class Adapted(nn.Module):
    """A frozen linear layer, and a trained adapter of low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.adapt_in, self.adapt_out = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs, shifted by the adapter's."""
        return self.base(x) + self.adapt_out(self.adapt_in(x))


class Block(nn.Module):
    """Causal attention and a gated feed-forward part, each with a residual."""

    def __init__(self, sizes: Sizes, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        width, kv_width = sizes.width, sizes.width // sizes.heads * sizes.kv_heads
        self.sizes = sizes
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = linear(width, width), linear(width, kv_width), linear(width, kv_width)
        self.o = linear(width, width)
        self.gate, self.up, self.down = (
            linear(width, sizes.hidden),
            linear(width, sizes.hidden),
            linear(sizes.hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, length, width], the same."""
        batch, length, width = x.shape
        y = self.norm1(x)

        def heads(values: Tensor) -> Tensor:
            return values.view(batch, length, -1, width // self.sizes.heads).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            heads(self.q(y)), heads(self.k(y)), heads(self.v(y)), is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Returns the mean cross entropy of the next tokens; with ``is_adapted`` only adapters are trained."""

    def __init__(self, sizes: Sizes, *, is_adapted: bool) -> None:
        super().__init__()

        def full(inputs: int, outputs: int) -> nn.Module:
            return nn.Linear(inputs, outputs, bias=False)

        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes, Adapted if is_adapted else full) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), full(sizes.width, sizes.vocabulary)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not is_adapted or ".adapt_" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of int64 tokens [batch, length]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())
