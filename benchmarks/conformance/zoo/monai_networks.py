"""Trials of MONAI: networks that segment and classify volumes, and its generative ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from monai.networks import nets
from torch import Tensor, nn

from benchmarks.conformance.trial import Trial


def _volume(side: int, channels: int = 1, images: int = 1) -> tuple[Tensor, ...]:
    return (torch.randn(images, channels, side, side, side),)


_NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "AttentionUnet": (
        lambda: nets.AttentionUnet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), dropout=0.1),
        lambda: _volume(48),
    ),
    "AutoencoderKL": (
        lambda: nets.AutoencoderKL(
            3, channels=(8, 16), attention_levels=(False, True), num_res_blocks=1, norm_num_groups=4, latent_channels=2
        ),
        lambda: _volume(24),
    ),
    "BasicUNet": (lambda: nets.BasicUNet(3, 1, 2, features=(8, 8, 16, 32, 64, 8)), lambda: _volume(48)),
    "DenseNet121": (lambda: nets.DenseNet121(3, 1, 2), lambda: _volume(48, images=2)),
    "DiffusionModelUNet": (
        lambda: nets.DiffusionModelUNet(
            2, 1, 1, channels=(16, 32), attention_levels=(False, True), num_res_blocks=1, norm_num_groups=8,
            num_head_channels=8,
        ),
        lambda: (torch.randn(4, 1, 32, 32), torch.randint(0, 1000, (4,))),
    ),
    "DynUNet": (
        lambda: nets.DynUNet(
            3, 1, 2, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[8, 16, 32],
            deep_supervision=True, res_block=True,
        ),
        lambda: _volume(48),
    ),
    "EfficientNetBN": (
        lambda: nets.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1),
        lambda: (torch.randn(4, 1, 128, 128),),
    ),
    "Generator": (
        lambda: nets.Generator((16,), (32, 4, 4), channels=(32, 16, 8), strides=(2, 2, 2)),
        lambda: (torch.randn(64, 16),),
    ),
    "HighResNet": (lambda: nets.HighResNet(3, 1, 2), lambda: _volume(32)),
    "RegUNet": (
        lambda: nets.RegUNet(3, 1, 8, 2, out_channels=3, out_kernel_initializer="zeros"), lambda: _volume(48),
    ),
    "Regressor": (
        lambda: nets.Regressor((1, 32, 32, 32), (2,), channels=(8, 16, 32), strides=(2, 2, 2)),
        lambda: _volume(32, images=4),
    ),
    "ResNet10": (
        lambda: nets.ResNet("basic", [1, 1, 1, 1], [8, 16, 32, 64], n_input_channels=1, num_classes=2),
        lambda: _volume(64),
    ),
    "SegResNet": (lambda: nets.SegResNet(3, 8, 1, 2, dropout_prob=0.1), lambda: _volume(48)),
    "SegResNetVAE": (lambda: nets.SegResNetVAE((32, 32, 32), in_channels=1, out_channels=2), lambda: _volume(32)),
    "SwinUNETR": (
        lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=3, drop_rate=0.1), lambda: _volume(64),
    ),
    "UNETR": (
        lambda: nets.UNETR(1, 2, (48, 48, 48), feature_size=8, hidden_size=96, mlp_dim=192, num_heads=4),
        lambda: _volume(48),
    ),
    "UNet": (
        lambda: nets.UNet(3, 1, 2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2, dropout=0.1),
        lambda: _volume(64),
    ),
    "VNet": (lambda: nets.VNet(3, 1, 2), lambda: _volume(32)),
    "VQVAE": (
        lambda: nets.VQVAE(
            3, 1, 1, channels=(8, 16), num_res_channels=(8, 16), num_res_layers=1,
            downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)), upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            num_embeddings=16, embedding_dim=8,
        ),
        lambda: _volume(32),
    ),
    "VarAutoEncoder": (
        lambda: nets.VarAutoEncoder(2, (1, 64, 64), 1, latent_size=8, channels=(8, 16, 32), strides=(2, 2, 2)),
        lambda: (torch.randn(16, 1, 64, 64),),
    ),
    "ViT": (
        lambda: nets.ViT(1, (48, 48, 48), (8, 8, 8), hidden_size=96, mlp_dim=192, num_layers=4, num_heads=4,
                         dropout_rate=0.1, classification=True),
        lambda: _volume(48, images=2),
    ),
}  # fmt: skip
NAMES = tuple(_NETWORKS)


def trials(name: str) -> Iterator[Trial]:
    """The network in training mode on one batch of noise."""
    make_network, make_images = _NETWORKS[name]
    yield Trial(make_network, lambda: (make_images(), {}))
