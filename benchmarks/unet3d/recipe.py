"""The optimizer of the case study, translated from Keras to torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

LEARNING_RATE = 5e-4


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
    """Adam at 5e-4 with Keras' eps, 1e-7 (torch's is 1e-8)."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-7)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Halves the rate after 10 epochs without progress; to be stepped with each epoch's loss.

    Keras reduces when the 10th epoch brought nothing (wait >= patience), torch when more than ``patience`` did, hence
    9. Keras calls a fall of more than 1e-4 progress, in absolute terms.
    """
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min", factor=0.5, patience=9, threshold=1e-4, threshold_mode="abs"
    )
