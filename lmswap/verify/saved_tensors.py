"""Bitwise comparison of each tensor that a backward unpacks with the original, which stays resident for it.

Under saved-tensor hooks the model's own code runs, so restored tensors are all that swapping can change in a step:
where each is bitwise identical to the current content of the original storage, so are all outputs and gradients.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from lmswap.errors import ResultDiffers
from lmswap.runtime.recorder import Recorder
from lmswap.verify.bitwise import difference
from lmswap.verify.summary import Verified


class SavedCheck:
    """The comparisons for one model, counted in ``verified``."""

    def __init__(self, verified: Verified, recorder: Recorder) -> None:
        """``recorder``: gives the step number for errors."""
        self._verified, self._recorder = verified, recorder

    def compare(self, made_by: str, expected: torch.Tensor, restored: torch.Tensor, node: str) -> None:
        """Compare a restored tensor with the original.

        Args:
            made_by: the module and the user's line that saved the tensor.
            expected: the view of the original storage, which autograd would have used.
            restored: the view that ``node`` of the backward gets.
            node: the node's name.

        Raises:
            ResultDiffers: they are not bitwise identical.
        """
        self._verified.num_saved += 1
        if (differs := difference(expected, restored)) is not None:
            self._verified.num_differences += 1
            result = f"saved tensor unpacked by {node}, {list(restored.shape)} of {restored.dtype}"
            raise ResultDiffers(self._recorder.num_steps + 1, result, made_by, **asdict(differs))
