"""What is tried? A model with random weights and one call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and those by name


@dataclass(frozen=True)
class Trial:
    """Model and call are made anew for each training, from the same random state."""

    make_model: Callable[[], nn.Module]
    make_call: Callable[[], Call]
    is_training: bool = True
