"""The optimization of the case study, translated from Keras to torch: step, optimizer, learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.unet3d.loss import weighted_dice_loss

Dtype = Literal["fp32", "bf16"]

LEARNING_RATE = 5e-4
MAX_EPOCHS = 500
STOP_PATIENCE = 50


def make_optimizer(parameters: Iterable[nn.Parameter], ranks: int = 1) -> torch.optim.Adam:
    """Adam at 5e-4 times the processes that train together, with Keras' eps, 1e-7 (torch's is 1e-8)."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE * ranks, eps=1e-7)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Halves the rate after 10 epochs without progress; to be stepped with each epoch's loss.

    Keras reduces when the 10th epoch brought nothing (wait >= patience), torch when more than ``patience`` did, hence
    9. Keras calls a fall of more than 1e-4 progress, in absolute terms.
    """
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min", factor=0.5, patience=9, threshold=1e-4, threshold_mode="abs"
    )


def should_stop(validation_losses: Sequence[float]) -> bool:
    """Whether the last 50 epochs brought no lower validation loss; any fall is progress here, as in Keras."""
    best = min(range(len(validation_losses)), key=validation_losses.__getitem__, default=0)
    return len(validation_losses) - 1 - best >= STOP_PATIENCE


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[object]:
    """What the forward pass runs in: bf16 means autocast over float32 weights."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, truth: Tensor, dtype: Dtype
) -> Tensor:
    """Runs one training step on a batch and returns its loss, on the CPU."""
    with autocast(images.device, dtype):
        probability = model(images)
    loss = weighted_dice_loss(probability, truth)
    del probability
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().cpu()
