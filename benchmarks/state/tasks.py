"""Models with the optimizer that trains them, and micro-batches for each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

from benchmarks.programs.models import Bottleneck, TransformerBlock, VisionTransformer, resnet50
from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.network import DecoderLevel, EncoderLevel, UNet3d
from benchmarks.weights.tasks import with_values
from benchmarks.whole_step.decoders import Block, Decoder, Sizes

_CLASSES, _MODALITIES, _LABELS = 1000, 4, 3


@dataclass(frozen=True)
class Task:
    """A model, what a step trains it on, and by which optimizer.

    ``make_model`` returns it without memory under ``torch.device("meta")``; where it has no buffers it gets its values
    from a pool, else from its own initialization.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], tuple[Tensor, ...]]  # a micro-batch, on the host
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    blocks: tuple[type[nn.Module], ...]  # modules that other tools move
    optimizer: type[Optimizer]
    settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    micro_batches: int = 2
    is_autocast: bool = False  # to bfloat16, with parameters in float32
    dtype: torch.dtype = torch.float32
    is_pooled: bool = True
    is_saved: bool = True  # and loaded after the warm-up

    @property
    def num_values(self) -> int:
        """Values that the optimizer keeps for each value of a parameter."""
        return 1 if self.optimizer is SGD else 2

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, gradients and state."""
        parameters = [*self.on_meta().parameters()]
        trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return sum(parameter.nbytes for parameter in parameters) + (1 + self.num_values) * trained_bytes

    def on_host(self) -> nn.Module:
        """The model with its values."""
        if not self.is_pooled:
            return self.make_model().to(self.dtype)
        return with_values(self.on_meta())

    def on_meta(self) -> nn.Module:
        """The model without memory."""
        with torch.device("meta"):
            return self.make_model().to(self.dtype)


def _decoder(sizes: Sizes, tokens: int, *, is_adapted: bool = False) -> Task:
    return Task(
        partial(Decoder, sizes, is_adapted=is_adapted),
        lambda generator: (torch.randint(sizes.vocabulary, (1, tokens), generator=generator),),
        lambda model, batch: model(batch[0]),  # its own
        (Block,),
        AdamW,
    )


def _tied(sizes: Sizes, tokens: int) -> Task:
    """A decoder whose embedding is its head, too, and whose first half of layers is frozen."""

    def make_model() -> nn.Module:
        model = Decoder(sizes, is_adapted=False)
        model.head.weight = model.embedding.weight
        model.layers[: sizes.layers // 2].requires_grad_(False)
        return model

    return replace(_decoder(sizes, tokens), make_model=make_model, is_pooled=False)


def _images(model: Callable[[], nn.Module], block: type[nn.Module], count: int, side: int) -> Task:
    def make_batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(count, 3, side, side, generator=generator)
        return images, torch.randint(_CLASSES, (count,), generator=generator)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    return Task(model, make_batch, loss, (block,), AdamW)


def _resnet50(count: int, side: int) -> Task:
    momentum = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    return replace(_images(resnet50, Bottleneck, count, side), optimizer=SGD, settings=momentum, is_pooled=False)


def _vit(layers: int, width: int, heads: int, *, count: int, side: int, patch: int) -> Task:
    model = partial(VisionTransformer, layers=layers, width=width, heads=heads, size=side, patch=patch)
    return _images(model, TransformerBlock, count, side)


def _unet3d(filters: int, side: int) -> Task:
    def make_batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        scan = torch.randn(1, _MODALITIES, side, side, side, generator=generator)
        return scan, (scan[:, :_LABELS] > 1).float()

    return Task(
        partial(UNet3d, base_filters=filters),
        make_batch,
        lambda model, batch: weighted_dice_loss(model(batch[0]), batch[1]),
        (EncoderLevel, DecoderLevel),
        Adam,
        is_pooled=False,
    )


_DECODERS = {
    "tiny": (Sizes(2, 128, 256, 4, 2, 512), 32),
    "small": (Sizes(6, 512, 1408, 8, 8, 1024), 32),
    "cpu": (Sizes(15, 1024, 2816, 16, 16, 4096), 128),  # 200 million parameters
}
# By name and size. On a GPU a checkpoint of 5 billion parameters with their state would take minutes.
TASKS: Mapping[str, Mapping[str, Task]] = {
    "gpt": {
        **{size: _decoder(*of) for size, of in _DECODERS.items()},
        "5b": replace(
            _decoder(Sizes(31, 3584, 9728, 28, 28, 32_000), 8192), micro_batches=4, is_autocast=True, is_saved=False
        ),
    },
    "resnet50": {"tiny": _resnet50(2, 64), "small": _resnet50(4, 64), "cpu": _resnet50(16, 112)},
    "unet3d": {"tiny": _unet3d(4, 32), "small": _unet3d(16, 32), "cpu": _unet3d(32, 64)},
    "lora": {size: _decoder(*of, is_adapted=True) for size, of in _DECODERS.items()},
    "tied": {size: _tied(*of) for size, of in _DECODERS.items()},
    "vit": {
        "tiny": _vit(2, 64, 4, count=2, side=32, patch=8),
        "small": _vit(6, 384, 6, count=4, side=64, patch=8),
        # 1.1 billion parameters, in bfloat16 with their state, as in torchao's own comparison.
        "vit-g": replace(_vit(40, 1536, 24, count=8, side=224, patch=14), micro_batches=4, dtype=torch.bfloat16),
    },
}
SIZES = [*dict.fromkeys(size for sizes in TASKS.values() for size in sizes)]


def micro_batches(task: Task, step: int) -> list[tuple[Tensor, ...]]:
    """Those of a step, on the host."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        tuple(each.to(task.dtype) if each.is_floating_point() else each for each in task.make_batch(generator))
        for _ in range(task.micro_batches)
    ]
