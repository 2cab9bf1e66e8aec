"""The networks of the first hour, with their inputs and losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from benchmarks.programs.models import Gpt, TransformerBlock, VisionTransformer, resnet50
from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.network import DecoderLevel, EncoderLevel, UNet3d

SHARES = (0.7, 0.5, 0.3)
_DIGEST_BYTES = 16
_SIDE = 144  # of a scan, on a card and emulated


@dataclass(frozen=True)
class Network:
    """A model, the tensors of one step, and its loss of what the model returns and the last of them."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    is_autocast: bool = False  # to bfloat16, with weights in float32
    blocks: tuple[type[nn.Module], ...] = ()  # which users would checkpoint

    def step(self, model: Callable[..., Tensor], batch: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        """Runs one training step and returns its loss, which some models compute themselves."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_autocast):
            loss = self.loss(model(*batch) if self.loss is _own_loss else model(batch[0]), batch[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def unet3d(side: int, dtype: torch.dtype = torch.float32) -> Network:
    """The 3D U-Net on one scan of ``side``³ voxels."""
    return Network(UNet3d, partial(_scan, side, dtype), weighted_dice_loss, dtype, blocks=(EncoderLevel, DecoderLevel))


def monai_unet(side: int, *, checkpoints: bool = False) -> Network:
    """MONAI's residual UNet of five levels, or its variant that checkpoints each, on one scan of ``side``³ voxels."""
    from monai.networks.nets import UNet  # noqa: PLC0415
    from monai.networks.nets.unet import CheckpointUNet  # noqa: PLC0415

    kind = CheckpointUNet if checkpoints else UNet
    model = partial(kind, 3, 4, 3, channels=(32, 64, 128, 256, 320), strides=(2, 2, 2, 2), num_res_units=2)
    return Network(model, partial(_scan, side, torch.float32), _logits_loss)


def few_images(*, are_small: bool) -> Network:
    """ResNet-50 on so few images that a step takes some 10 ms on an H200."""
    return Network(resnet50, partial(_images, 4 if are_small else 16, 128 if are_small else 224), cross_entropy)


def gpt_1b() -> Network:
    """A GPT of 1.0 B parameters in bfloat16, on one text of 8,192 tokens."""
    model = partial(Gpt, layers=24, width=1792, heads=14, tokens=8192, words=50257)
    return Network(model, partial(_texts, 1, 8192, 50257), _own_loss, torch.bfloat16, blocks=(TransformerBlock,))


def _scan(side: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    voxels = (side, side, side)
    return torch.randn(1, 4, *voxels).to(dtype), (torch.rand(1, 3, *voxels) < 0.1).to(dtype)


def _images(count: int, side: int) -> tuple[Tensor, ...]:
    return torch.randn(count, 3, side, side), torch.randint(1000, (count,))


def _texts(count: int, tokens: int, words: int) -> tuple[Tensor, ...]:
    text = torch.randint(words, (count, tokens + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def networks(*, are_small: bool) -> dict[str, Network]:
    """By name; large ones are those of benchmarks/programs.

    Small ones have plans in 30 %: of smaller steps, what is fixed is more than that. The U-Net is one in both.
    """
    images, pixels, texts, tokens, words = (64, 128, 16, 256, 2048) if are_small else (64, 224, 8, 1024, 50257)
    vit = {"layers": 8, "width": 192, "heads": 3} if are_small else {"layers": 12, "width": 768, "heads": 12}
    gpt = {"layers": 10, "width": 192, "heads": 3} if are_small else {"layers": 24, "width": 1024, "heads": 16}
    return {
        "unet3d": unet3d(_SIDE),
        "unet3d_bf16": unet3d(_SIDE, torch.bfloat16),
        "resnet50": Network(resnet50, partial(_images, images, pixels), cross_entropy),
        "gpt": Network(
            partial(Gpt, **gpt, tokens=tokens, words=words),
            partial(_texts, texts, tokens, words),
            _own_loss,
            blocks=(TransformerBlock,),
        ),
        "gpt_autocast": Network(
            partial(Gpt, **gpt, tokens=tokens, words=words),
            partial(_texts, texts, tokens, words),
            _own_loss,
            is_autocast=True,
        ),
        "vit": Network(partial(VisionTransformer, **vit, size=pixels), partial(_images, 64, pixels), cross_entropy),
    }


def _logits_loss(logits: Tensor, truth: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, truth)


def _own_loss(loss: Tensor, _: Tensor) -> Tensor:
    return loss


def budgets(between_bytes: int, peak_bytes: int, shares: Sequence[float] = SHARES) -> dict[float, int]:
    """By share: the budget in bytes, ``between_bytes`` plus that share of the bytes from there to ``peak_bytes``."""
    return {share: int(between_bytes + share * (peak_bytes - between_bytes)) for share in shares}


def digest(model: nn.Module) -> str:
    """Equal for two models whose parameters and buffers have the same bits."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
