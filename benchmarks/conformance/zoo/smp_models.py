"""Trials of segmentation_models_pytorch: each decoder once, over several encoders."""

from __future__ import annotations

from collections.abc import Iterator

import segmentation_models_pytorch as smp
import torch

from benchmarks.conformance.trial import Trial

# By name: encoder, images and their side.
_MODELS = {
    "DeepLabV3": ("resnet18", 2, 128),
    "DeepLabV3Plus": ("efficientnet-b0", 2, 128),
    "FPN": ("mobilenet_v2", 2, 160),
    "Linknet": ("resnet18", 4, 160),
    "Segformer": ("mit_b0", 4, 160),
    "Unet": ("resnet18", 4, 160),
    "UnetPlusPlus": ("mobilenet_v2", 2, 160),
}
NAMES = tuple(_MODELS)


def trials(name: str) -> Iterator[Trial]:
    """The model in training mode on one batch of noise."""
    encoder, images, side = _MODELS[name]
    yield Trial(
        lambda: getattr(smp, name)(encoder, encoder_weights=None, classes=3),
        lambda: ((torch.randn(images, 3, side, side),), {}),
    )
