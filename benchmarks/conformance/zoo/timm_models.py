"""Trials of timm: small models of many families, on batches that make activations outweigh weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch

from benchmarks.conformance.trial import Trial

# By name: images, their side, and what the model is made with beside its defaults.
_MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "botnet26t_256": (4, 256, {}),
    "coat_lite_tiny": (4, 224, {}),
    "coatnet_nano_rw_224": (2, 224, {"drop_path_rate": 0.1}),
    "convmixer_768_32": (1, 128, {}),
    "convnext_atto": (8, 128, {"drop_path_rate": 0.1}),
    "crossvit_tiny_240": (2, 240, {}),
    "darknet17": (4, 192, {}),
    "deit3_small_patch16_224": (4, 224, {"depth": 4}),
    "densenet121": (4, 96, {}),
    "edgenext_xx_small": (8, 192, {}),
    "efficientnet_b0": (4, 128, {"drop_rate": 0.2, "drop_path_rate": 0.2}),
    "efficientvit_b0": (8, 224, {}),
    "eva02_tiny_patch14_224": (2, 224, {"depth": 4}),
    "fastvit_t8": (4, 192, {}),
    "ghostnet_100": (8, 160, {}),
    "lcnet_050": (16, 160, {}),
    "levit_128s": (8, 224, {}),
    "maxvit_rmlp_pico_rw_256": (1, 256, {}),
    "mixer_s32_224": (8, 224, {}),
    "mobilenetv2_050": (8, 128, {}),
    "mobilenetv3_small_100": (16, 160, {}),
    "mobilenetv4_conv_small": (8, 160, {}),
    "poolformer_s12": (2, 192, {}),
    "pvt_v2_b0": (4, 224, {}),
    "regnetx_002": (8, 160, {}),
    "repvgg_a0": (4, 192, {}),
    "resmlp_12_224": (2, 224, {}),
    "resnest14d": (4, 192, {}),
    "resnet26d": (4, 192, {}),
    "seresnext26ts": (4, 192, {}),
    "swin_tiny_patch4_window7_224": (2, 224, {"depths": (2, 2, 2, 2), "drop_path_rate": 0.1}),
    "twins_svt_small": (1, 224, {}),
    "visformer_tiny": (4, 224, {}),
    "vit_tiny_patch16_224": (4, 224, {"drop_rate": 0.1, "attn_drop_rate": 0.1}),
    "volo_d1_224": (1, 224, {}),
    "xcit_nano_12_p16_224": (4, 224, {}),
}
NAMES = tuple(_MODELS)


def trials(name: str) -> Iterator[Trial]:
    """The model in training mode on one batch of noise."""
    images, side, options = _MODELS[name]
    yield Trial(
        lambda: timm.create_model(name, num_classes=10, **options),
        lambda: ((torch.randn(images, 3, side, side),), {}),
    )
