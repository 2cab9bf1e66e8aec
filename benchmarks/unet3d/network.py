"""The 3D U-Net of Isensee et al. (BraTS 2017 proceedings, p. 100; arXiv 1802.10508) as Ellis's Keras code builds it.

The case study trained this network, so layer order, widths and constants follow that code rather than the paper.
Where Keras and torch differ:

* LeakyReLU: Keras' default slope 0.3 (torch 0.01).
* Convolutions: Glorot-uniform kernels and zero bias (torch: Kaiming-uniform with a = √5, uniform bias).
* InstanceNorm: keras_contrib divides by (std + 1e-3), torch by sqrt(var + eps). eps = 1e-6 gives a constant channel
  the same gain, 1000; at a standard deviation of 1 the two differ by a factor of 1.001, which the scale absorbs.
* Stride 2: TensorFlow's "same" pads (0, 1), torch here (1, 1) with the last row unused: the same shape, sampled one
  voxel earlier. SpatialDropout3D is Dropout3d. Nothing needs translating there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Head = Literal["conv", "block"]

NEGATIVE_SLOPE = 0.3
NORM_EPS = 1e-6
DEPTH = 5
SIZE_MULTIPLE = 2 ** (DEPTH - 1)
MIN_SIZE = 2 * SIZE_MULTIPLE  # the deepest level needs more than one voxel: InstanceNorm of a single voxel is undefined


def _block(channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2),
        nn.InstanceNorm3d(channels_out, eps=NORM_EPS, affine=True),
        nn.LeakyReLU(NEGATIVE_SLOPE),
    )


def _head(kind: Head, channels_in: int, labels: int) -> nn.Module:
    return nn.Conv3d(channels_in, labels, 1) if kind == "conv" else _block(channels_in, labels, kernel=1)


class EncoderLevel(nn.Module):
    """One level down: a convolution that halves the side (not at the top), plus its residual context.

    Args:
        channels_in: of its input.
        channels_out: of its output.
        stride: of the convolution: 2, or 1 at the top.
        dropout: the probability with which a channel of the context is zeroed.
    """

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, dropout: float) -> None:
        super().__init__()
        self.entry = _block(channels_in, channels_out, stride=stride)
        self.context = nn.Sequential(
            _block(channels_out, channels_out), nn.Dropout3d(dropout), _block(channels_out, channels_out)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, in, D, H, W) to (N, out, D/stride, H/stride, W/stride)."""
        entry: Tensor = self.entry(x)
        context: Tensor = self.context(entry)
        return entry + context


class DecoderLevel(nn.Module):
    """One level up: doubles the side, joins the encoder's features of that level, and mixes both."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), _block(channels_in, channels_out))
        self.localize = nn.Sequential(
            _block(2 * channels_out, channels_out), _block(channels_out, channels_out, kernel=1)
        )

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Maps (N, in, n, n, n) and the skip (N, out, 2n, 2n, 2n) to the skip's shape; the skip comes first."""
        mixed: Tensor = self.localize(torch.cat([skip, self.up(x)], dim=1))
        return mixed


class UNet3d(nn.Module):
    """Maps scans (N, modalities, n, n, n) to probabilities (N, labels, n, n, n); n a multiple of 16, at least 32.

    "Deep supervision" here means that the heads of three levels are summed into one output; there is no second loss.

    Args:
        modalities: channels of the scans.
        labels: channels of the output.
        base_filters: channels of the top level, doubled at each level down.
        dropout: the probability with which a channel of an encoder's context is zeroed.
        head: "conv", a plain 1x1x1 convolution (8 269 561 parameters with the defaults), or "block", with
            normalisation and activation as the case study ran it (8 269 579).
    """

    def __init__(
        self,
        *,
        modalities: int = 4,
        labels: int = 3,
        base_filters: int = 16,
        dropout: float = 0.3,
        head: Head = "conv",
    ) -> None:
        super().__init__()
        widths = [base_filters * 2**level for level in range(DEPTH)]
        self.encoder = nn.ModuleList(
            EncoderLevel(widths[level - 1] if level else modalities, width, stride=2 if level else 1, dropout=dropout)
            for level, width in enumerate(widths)
        )
        self.decoder = nn.ModuleList(
            DecoderLevel(widths[level + 1], widths[level]) for level in reversed(range(DEPTH - 1))
        )
        self.heads = nn.ModuleList(_head(head, widths[level], labels) for level in (2, 1, 0))
        self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")
        self.apply(_initialize_like_keras)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the probability of each label in each voxel."""
        skips: list[Tensor] = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
        skips.pop()
        outputs: list[Tensor] = []
        for level in self.decoder:
            x = level(x, skips.pop())
            outputs.append(x)
        logits: Tensor = self.heads[0](outputs[-3])
        for head, output in zip(self.heads[1:], outputs[-2:], strict=True):
            logits = self.enlarge(logits) + head(output)
        return torch.sigmoid(logits)


def _initialize_like_keras(module: nn.Module) -> None:
    if isinstance(module, nn.Conv3d):
        nn.init.xavier_uniform_(module.weight)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
