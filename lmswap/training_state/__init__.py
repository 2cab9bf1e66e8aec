"""State of a training from step to step: weights, gradients and optimizer state, resident or in host copies.

Plans decide for weights, see `weights`; what optimizers read and write in an update may stream through the device, a
few parameters at a time (`updates`, `optimizer_state`), with the gradients that backwards leave (`gradients`), or be
updated on the CPU (`cpu_updates`). `optimizer_memory` measures and predicts what it all takes.
"""

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
