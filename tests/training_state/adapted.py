"""A network of frozen layers with small trained adapters, as in LoRA, and its training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import gelu

WIDTH, LAYERS = 512, 6


class Adapted(nn.Module):
    """A frozen layer of 4 MiB in two halves, and its adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapter_in, self.adapter_out = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x)))) + self.adapter_out(self.adapter_in(x))


class Network(nn.Module):
    """Layers between an embedding and a head that share their weight."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList(Adapted() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1000)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def network(*, trained: str = "adapter", layers: int = LAYERS) -> Network:
    """The network with fixed weights, 4 MiB a layer; those with ``trained`` in their name are trained."""
    torch.manual_seed(0)
    made = Network(layers)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(trained in name)
    return made


def tokens(step: int) -> torch.Tensor:
    """The batch of a step."""
    return torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, steps: int, between: Callable[[nn.Module, int], object] = lambda model, step: None
) -> list[torch.Tensor]:
    """Train, calling ``between`` after each step; return losses, what ``between`` returned, and the parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    seen = []
    for step in range(steps):
        batch = tokens(step)
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        returned = between(model, step)
        seen += [loss.detach(), *([returned.clone()] if isinstance(returned, torch.Tensor) else [])]
    return [*seen, *model.parameters()]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all tensors are bitwise equal."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
