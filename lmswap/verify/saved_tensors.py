"""Bitwise comparison of each tensor that a backward unpacks with the original, which stays resident for it.

Under saved-tensor hooks the model's own code runs, so restored tensors are all that swapping can change in a step:
where each is bitwise identical to the current content of the original storage, so are all outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lmswap.errors import ResultDiffers
from lmswap.execute.recorder import Recorder
from lmswap.user_frame import user_line_and_module
from lmswap.verify.bitwise import difference
from lmswap.verify.summary import Verified


@dataclass(frozen=True)
class SavedBy:
    """The module and the line of user code that saved a tensor."""

    module: str
    source: str


class SavedCheck:
    """The comparisons for one model, counted in ``verified``."""

    def __init__(self, verified: Verified, recorder: Recorder) -> None:
        """``recorder``: gives the step number for errors."""
        self._verified, self._recorder = verified, recorder

    def saved_by(self, names: Mapping[int, str]) -> SavedBy:
        """Return the module and user line that run now; ``names``: the model's module names by identity."""
        source, module = user_line_and_module(names)
        return SavedBy(module, source)

    def compare(self, by: SavedBy, expected: torch.Tensor, restored: torch.Tensor, node: str) -> None:
        """Compare a restored tensor with the original.

        Args:
            by: where the tensor was saved.
            expected: the view of the original storage, which autograd would have used.
            restored: the view that ``node`` of the backward gets.
            node: the node's name.

        Raises:
            ResultDiffers: they are not bitwise identical.
        """
        self._verified.num_saved += 1
        differs = difference(expected, restored)
        if differs is None:
            return
        self._verified.num_differences += 1
        raise ResultDiffers(
            step=self._recorder.num_steps + 1,
            result=f"saved tensor unpacked by {node}, {list(restored.shape)} of {restored.dtype}",
            made_by=f"module '{by.module}'" + (f" ({by.source})" if by.source else ""),
            num_differing=differs.num_differing,
            num_elements=differs.num_elements,
            first=differs.first,
            is_nan=differs.is_nan,
        )
