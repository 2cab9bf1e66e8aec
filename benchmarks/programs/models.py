"""Networks whose training steps are planned, besides the 3D U-Net of benchmarks/unet3d: plain, of usual sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.unet3d.network import NORM_EPS


class KerasInstanceNorm(nn.Module):
    """InstanceNorm as keras_contrib writes it, an op at a time: the graph that IBM's case study swapped."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, D, H, W) to the same shape, each channel of each image with mean 0 and deviation 1."""
        axes = (2, 3, 4)
        mean = x.mean(axes, keepdim=True)
        deviation = (x - x.mean(axes, keepdim=True)).square().mean(axes, keepdim=True).sqrt() + NORM_EPS
        return (x - mean) / deviation * self.scale + self.shift


def write_norms_out(model: nn.Module) -> nn.Module:
    """Replaces every InstanceNorm3d in ``model`` by a `KerasInstanceNorm`; returns the same model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.InstanceNorm3d):
                setattr(module, name, KerasInstanceNorm(child.num_features))
    return model


class Bottleneck(nn.Module):
    """Three convolutions, each normalised, added to what came in."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.branch = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, in, h, w) to (N, 4 * width, h / stride, w / stride)."""
        return functional.relu(self.branch(x) + self.shortcut(x), inplace=True)


def resnet50(classes: int = 1000) -> nn.Sequential:
    """ResNet-50 (He et al. 2015, stride in the 3x3 convolution): (N, 3, 224, 224) to (N, classes)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride=2 if stage and not block else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int, *, is_causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, tokens, width) to the same shape."""
        x = x + self.dropout(self.merge(self._attend(self.norm_attention(x))))
        mixed: Tensor = x + self.dropout(self.perceptron(self.norm_perceptron(x)))
        return mixed

    def _attend(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind()
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.is_causal)
        return mixed.transpose(1, 2).flatten(2)


class Gpt(nn.Module):
    """A decoder like GPT-2; as there, the model itself returns the loss of the next token, a scalar.

    Its logits are an activation like others that way, not an output that the caller holds.
    """

    def __init__(self, *, layers: int, width: int, heads: int, tokens: int, words: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        # As in GPT-2: with torch's own, of variance 1, probabilities of words are subnormal numbers, slow on a CPU.
        nn.init.normal_(self.words.weight, std=0.02)
        self.places = nn.Parameter(torch.zeros(tokens, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, is_causal=True, dropout=dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor, next_words: Tensor) -> Tensor:
        """Maps two tensors of word numbers (N, tokens) to the mean cross entropy."""
        x = self.blocks(self.dropout(self.words(words) + self.places))
        logits = functional.linear(self.norm(x), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), next_words.flatten())


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2020): (N, 3, size, size) to (N, classes)."""

    def __init__(
        self, *, layers: int, width: int, heads: int, size: int = 224, patch: int = 16, classes: int = 1000
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.label = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, is_causal=False, dropout=0.0) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the score of each class for each image."""
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.label.expand(len(x), -1, -1), patches], dim=1) + self.places
        scores: Tensor = self.classify(self.norm(self.blocks(tokens))[:, 0])
        return scores
