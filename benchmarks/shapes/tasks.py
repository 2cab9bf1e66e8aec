"""Models whose inputs have other sizes in each step: texts, speech, and images for detection."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

_NUM_TOKENS, _WIDTH = 500, 192


@dataclass(frozen=True)
class Task:
    """A model, and how its inputs are drawn."""

    make: Callable[[], nn.Module]
    draw: Callable[[random.Random], tuple[int, ...]]  # a size of the input in each dimension that varies
    batch: Callable[..., torch.Tensor]  # takes what was drawn


class Text(nn.Module):
    """A decoder of four layers with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_NUM_TOKENS, _WIDTH), nn.Embedding(512, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, 0.1, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(_WIDTH, _NUM_TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(ids) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


class Speech(nn.Module):
    """Strided convolutions over time, and attention between what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(80, 128, 5, 2, 2), nn.GELU(), nn.Conv1d(128, 128, 5, 2, 2), nn.GELU()
        )
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(128, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for each step of time that is left."""
        logits: torch.Tensor = self.head(self.encoder(self.convolutions(x).transpose(1, 2)))
        return logits


class Detection(nn.Module):
    """A convolutional network with batch norm and a prediction for each place."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 96)
        self.stages = nn.Sequential(
            *(
                layer
                for given, width in pairwise(widths)
                for layer in (nn.Conv2d(given, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
            )
        )
        self.head = nn.Conv2d(widths[-1], 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return predictions by place."""
        found: torch.Tensor = self.head(self.stages(x)).flatten(2).transpose(1, 2)
        return found


TASKS = {
    "text": Task(
        Text, lambda draw: (draw.randint(40, 320),), lambda length: torch.randint(0, _NUM_TOKENS, (8, length))
    ),
    "speech": Task(Speech, lambda draw: (draw.randint(200, 1600),), lambda length: torch.randn(2, 80, length)),
    "detection": Task(
        Detection,
        lambda draw: (draw.randint(96, 320), draw.randint(96, 320)),
        lambda height, width: torch.randn(2, 3, height, width),
    ),
}
