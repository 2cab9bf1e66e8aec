"""The weights of a model without parameters."""

from typing import Any

import torch

from lmswap.runtime.host_copies import HostCopies
from lmswap.training_state import TrainingState
from lmswap.training_state.weights import Weights


def no_weights() -> Weights:
    """Weights that no plan places."""
    engine: Any = None
    return Weights(
        TrainingState(dict), HostCopies(engine, "disk", torch.device("cpu"), lambda: 0), min_bytes=1, note=print
    )
