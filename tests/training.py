"""Training steps: their results and the comparison of these; the session of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lmswap import api
from lmswap.session.session import Session


def loss_and_gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Run the backward of ``loss``; return copies of it and of the gradients of ``model``."""
    loss.backward()
    return [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]


def same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether both have the same number of tensors, at least one, with equal values in each; NaN equals nothing."""
    return len(actual) == len(expected) > 0 and all(map(torch.equal, actual, expected))


def session_of(model: nn.Module) -> Session:
    """Return the session of the enabled ``model``."""
    return api._sessions[model]
