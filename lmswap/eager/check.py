"""Does the backward take back what the forward saved? Each saved tensor is kept for comparison beside its swapped copy.

Under saved-tensor hooks the model's own code runs, and what comes back from a tier is all that swapping can change in a
step: where it is what was saved, to the bit, so are all outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lmswap.eager.recording import where
from lmswap.errors import ResultDiffers
from lmswap.execute.compare import difference
from lmswap.execute.record import Recorder
from lmswap.ir.verified import Verified


@dataclass(frozen=True)
class Kept:
    """A copy of a saved tensor, and the module and the user's line that saved it."""

    tensor: torch.Tensor
    module: str
    source: str


class SavedCheck:
    """The checks of one model's saved tensors; they are counted in ``verified``."""

    def __init__(self, verified: Verified, recorder: Recorder) -> None:
        """``recorder`` knows the number of the step."""
        self._verified, self._recorder = verified, recorder

    def keep(self, tensor: torch.Tensor, names: Mapping[int, str]) -> Kept:
        """A copy of ``tensor``, which is being saved; ``names`` are those of the model's modules by identity."""
        # In memory of numpy's, which the budget does not count: plans are made from what is recorded meanwhile.
        flat = torch.from_numpy(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().copy())
        source, module = where(names)
        return Kept(flat.view(tensor.dtype).view(tensor.shape), module, source)

    def compare(self, kept: Kept, restored: torch.Tensor, node: str) -> None:
        """``node`` of the backward takes ``restored`` back.

        Raises:
            ResultDiffers: it is not what was saved.
        """
        self._verified.num_saved += 1
        differs = difference(kept.tensor, restored.cpu())
        if differs is None:
            return
        self._verified.num_differences += 1
        raise ResultDiffers(
            step=self._recorder.num_steps + 1,
            result=f"what {node} takes back, {list(restored.shape)} of {restored.dtype}",
            made_by=f"module '{kept.module}'" + (f" ({kept.source})" if kept.source else ""),
            num_differing=differs.num_differing,
            num_elements=differs.num_elements,
            first=differs.first,
            is_nan=differs.is_nan,
        )
