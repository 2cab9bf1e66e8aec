"""The loss of the case study: weighted Dice."""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTH = 1e-5


def weighted_dice_loss(probability: Tensor, truth: Tensor) -> Tensor:
    """Minus the mean over batch and labels of the soft Dice coefficient; "weighted" as each label weighs the same.

    2(Σ y·p + s/2) / (Σ y + Σ p + s) with s = 1e-5 and sums over the three axes of space; in float32 also under
    autocast, as a sum over a cube in bfloat16 would lose its last voxels.

    Args:
        probability: (N, labels, n, n, n), from 0 to 1.
        truth: the same shape, 0 or 1.
    """
    with torch.autocast(probability.device.type, enabled=False):
        p, y = probability.float(), truth.float()
        space = (2, 3, 4)
        overlap = (y * p).sum(space)
        dice = 2 * (overlap + SMOOTH / 2) / (y.sum(space) + p.sum(space) + SMOOTH)
        return -dice.mean()
