"""The trained models with a batch each, small enough for a CPU or of the size that fills a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.programs.models import Bottleneck, Gpt, TransformerBlock, VisionTransformer, resnet50
from benchmarks.unet3d.network import DecoderLevel, EncoderLevel, UNet3d

SIZES = ("small", "full")


@dataclass(frozen=True)
class Task:
    """A model, one batch for it, and the modules that its users would checkpoint."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, ...]]
    blocks: tuple[type[nn.Module], ...]

    def loss(self, output: Tensor) -> Tensor:
        """The loss, a scalar: the model's own if it returns one."""
        return output if output.ndim == 0 else output.float().square().mean()


def _unet3d(side: int, filters: int, dtype: torch.dtype) -> Task:
    return Task(
        lambda: UNet3d(base_filters=filters).to(dtype),
        lambda: (torch.randn(1, 4, side, side, side, dtype=dtype),),
        (EncoderLevel, DecoderLevel),
    )


def _images(batch: int, side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 3, side, side),)


def _gpt(*, layers: int, width: int, heads: int, tokens: int, words: int, batch: int) -> Task:
    def make_batch() -> tuple[Tensor, Tensor]:
        text = torch.randint(0, words, (batch, tokens + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Task(
        lambda: Gpt(layers=layers, width=width, heads=heads, tokens=tokens, words=words),
        make_batch,
        (TransformerBlock,),
    )


TASKS = {
    "small": {
        "unet3d": _unet3d(96, 8, torch.float32),
        "unet3d_bf16": _unet3d(96, 8, torch.bfloat16),
        "resnet50": Task(resnet50, _images(64, 112), (Bottleneck,)),
        "gpt": _gpt(layers=8, width=192, heads=4, tokens=256, words=1024, batch=24),
        "vit": Task(
            lambda: VisionTransformer(layers=8, width=192, heads=4, size=128, patch=8),
            _images(32, 128),
            (TransformerBlock,),
        ),
    },
    # Those of benchmarks/programs; GPT-2 medium and ViT-B/16.
    "full": {
        "unet3d": _unet3d(192, 16, torch.float32),
        "unet3d_bf16": _unet3d(192, 16, torch.bfloat16),
        "resnet50": Task(resnet50, _images(64, 224), (Bottleneck,)),
        "gpt": _gpt(layers=24, width=1024, heads=16, tokens=1024, words=50257, batch=8),
        "vit": Task(lambda: VisionTransformer(layers=12, width=768, heads=12), _images(64, 224), (TransformerBlock,)),
    },
}
MODELS = tuple(TASKS["small"])
