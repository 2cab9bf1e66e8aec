"""The models whose whole steps are planned, by name: decoders, ViT-g, and the 3D U-Net, all in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.models import VisionTransformer
from benchmarks.unet3d.network import UNet3d
from benchmarks.whole_step.decoders import SIZES, Decoder

MODELS = (*(f"{size}{kind}" for size in SIZES for kind in ("", "-lora")), "vit-g", "unet3d")


class Checkpointed(nn.Module):
    """A layer that saves its inputs only, and is recomputed in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        """The layer's outputs."""
        outputs: Tensor = checkpoint(self.layer, *inputs, use_reentrant=False)
        return outputs


def variants(name: str, size: int) -> Iterator[Callable[[], nn.Module]]:
    """Yield what makes the model ``name``, as it is planned; then other ways to write it, which peers may choose.

    Args:
        name: one of `MODELS`; with "-lora", adapters on a frozen base.
        size: tokens of a sequence, or the side of an image or a volume.
    """
    if name == "vit-g":  # the largest of DINOv2, with a plain perceptron
        yield from _with_checkpoints(lambda: VisionTransformer(layers=40, width=1536, heads=24, size=size, patch=14))
    elif name == "unet3d":
        yield from _with_checkpoints(UNet3d)
    else:
        decoder, _, kind = name.partition("-")
        yield lambda: Decoder(SIZES[decoder], is_adapted=kind == "lora").to(torch.bfloat16)


def _with_checkpoints(make: Callable[[], nn.Module]) -> Iterator[Callable[[], nn.Module]]:
    yield lambda: make().to(torch.bfloat16)
    yield lambda: _checkpointed(make()).to(torch.bfloat16)


def _checkpointed(model: nn.Module) -> nn.Module:
    """The same model with every layer of its lists checkpointed."""
    for layers in model.children():
        if isinstance(layers, nn.Sequential | nn.ModuleList):
            for number, layer in enumerate(layers):
                layers[number] = Checkpointed(layer)
    return model


def example(name: str, count: int, size: int) -> Tensor:
    """A batch of ``count`` sequences, images or volumes, without bytes."""
    if name in ("vit-g", "unet3d"):
        shape = (count, 3, size, size) if name == "vit-g" else (count, 4, size, size, size)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return torch.empty((count, size), dtype=torch.int64, device="meta")
