"""Does the backward take back what torch itself would give it? Each saved storage stays, beside its swapped copy.

Under saved-tensor hooks the model's own code runs, and what comes back from a tier is all that swapping can change in a
step: where it is what the storage holds by then, to the bit, so are all outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from lmswap.eager.alive import Alive
from lmswap.errors import ResultDiffers
from lmswap.execute.compare import difference
from lmswap.execute.record import Recorder
from lmswap.ir.verification import Verified
from lmswap.userline import user_line_and_module


class Kept(Protocol):
    """A storage that was saved; see `lmswap.eager.saved.SavedStorage`."""

    nbytes: int


@dataclass(frozen=True)
class SavedBy:
    """The module and the user's line that saved a tensor."""

    module: str
    source: str


class SavedCheck:
    """The checks of one model's saved tensors; they are counted in ``verified``."""

    def __init__(self, verified: Verified, recorder: Recorder) -> None:
        """``recorder`` knows the number of the step."""
        self._verified, self._recorder = verified, recorder
        self._away = Alive[Kept]()  # by identity
        self._bytes: dict[int, int] = {}  # of these, by identity
        self._kept_bytes = 0

    def kept_bytes(self) -> int:
        """What is on the device for the checks only; plans are made from what is recorded meanwhile."""
        for identity in self._away.take_dead():
            self._kept_bytes -= self._bytes.pop(identity)
        return self._kept_bytes

    def saved_by(self, names: Mapping[int, str]) -> SavedBy:
        """Who saves a tensor now; ``names`` are those of the model's modules by identity."""
        source, module = user_line_and_module(names)
        return SavedBy(module, source)

    def has_left(self, storage: Kept) -> None:
        """The device memory of ``storage`` would be free if it were not kept to be compared."""
        kept_bytes = self.kept_bytes()  # without the dead, whose identities are given again
        if id(storage) not in self._bytes:
            self._away[id(storage)] = storage
            self._bytes[id(storage)] = storage.nbytes
            self._kept_bytes = kept_bytes + storage.nbytes

    def compare(self, by: SavedBy, expected: torch.Tensor, restored: torch.Tensor, node: str) -> None:
        """``node`` of the backward takes ``restored`` back, where torch itself would give it ``expected``.

        Raises:
            ResultDiffers: they are not the same.
        """
        self._verified.num_saved += 1
        differs = difference(expected, restored)
        if differs is None:
            return
        self._verified.num_differences += 1
        raise ResultDiffers(
            step=self._recorder.num_steps + 1,
            result=f"what {node} takes back, {list(restored.shape)} of {restored.dtype}",
            made_by=f"module '{by.module}'" + (f" ({by.source})" if by.source else ""),
            num_differing=differs.num_differing,
            num_elements=differs.num_elements,
            first=differs.first,
            is_nan=differs.is_nan,
        )
