"""LARS, an optimizer for large batches: each tensor's step is in proportion to the norm of its weights.

You, Gitman, Ginsburg 2017 (arXiv 1708.03888): SGD with momentum, in which the rate of each tensor is multiplied by
η ‖w‖ / (‖g‖ + β ‖w‖) for weights w, gradient g and weight decay β.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

TRUST = 0.001  # η


class Lars(torch.optim.Optimizer):
    """v ← m v + r (g + β w), w ← w - v, where r is ``lr`` times the trust ratio; groups without decay take plain SGD.

    Weights or gradients of norm 0 have a trust ratio of 1.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step; ``closure`` computes the gradients again."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._update(weights, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _update(self, weights: Tensor, rate: float, momentum: float, decay: float) -> None:
        assert weights.grad is not None
        direction, ratio = weights.grad + decay * weights, torch.ones((), device=weights.device)
        if decay:
            length, slope = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(weights.grad)
            has_both = (length > 0) & (slope > 0)
            ratio = torch.where(has_both, TRUST * length / (slope + decay * length), ratio)
        velocity = self.state[weights].setdefault("velocity", torch.zeros_like(weights))
        velocity.mul_(momentum).add_(rate * ratio * direction)
        weights.sub_(velocity)
