"""The state of a model's training from step to step: parameters, buffers, and the optimizers with their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

# Returns the tensors that a model has now, by all of their names: a caller may replace them.
NamedTensors = Callable[[], Mapping[str, torch.Tensor]]


class TrainingState(NamedTuple):
    """The parameters and buffers of a model, and the optimizers whose state may stream, or be updated on the CPU."""

    parameters: NamedTensors
    buffers: NamedTensors = dict[str, torch.Tensor]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    updates_on_cpu: bool = False
