"""The memory of a small model's step, counted as on a GPU: what tensors hold, and nothing else.

A process's resident memory, which the budget counts on a CPU, moves by megabytes that have nothing to do with the
step; half of a small model's activations would drown in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import lmswap.hardware.memory
import lmswap.session.session
from lmswap.hardware.memory import CpuMemory
from lmswap.session import budget

# The heap counts whole pages: smaller tensors would count for more than they are, and those not counted are few bytes.
_SMALLEST_COUNTED_BYTES = 4096


class TensorMemory(CpuMemory):
    """What tensors have come to hold since this object was made; for a budget and for measuring."""

    def __init__(self, device: torch.device) -> None:
        self._held_bytes = 0
        super().__init__(device)
        self._held_bytes = super().used_tensor_bytes()

    def used_tensor_bytes(self) -> int:
        """See `DeviceMemory`; so are the others."""
        return max(0, super().used_tensor_bytes() - self._held_bytes)

    def peak_tensor_bytes(self) -> int:  # noqa: D102
        return max(0, super().peak_tensor_bytes() - self._held_bytes)

    def lap_peaks(self, *, restart: bool = False) -> tuple[int, int]:  # noqa: D102
        tensor_bytes = max(0, super().lap_peaks(restart=restart)[1] - self._held_bytes)
        return tensor_bytes, tensor_bytes

    def lap_tensor_peak_bytes(self) -> int:  # noqa: D102
        return max(0, super().lap_tensor_peak_bytes() - self._held_bytes)

    used_bytes = used_tensor_bytes


@contextmanager
def counting_tensors() -> Iterator[TensorMemory]:
    """Budgets in this process count what tensors hold; gives what measures the same.

    All steps are given the same margin: what fits because nothing grows is not what is looked for.
    """
    with (
        mock.patch.dict(budget._MARGIN_UNMOVED, budget._MARGIN),
        mock.patch.dict(budget._MARGIN_SETTLED, budget._MARGIN),
        mock.patch.object(lmswap.hardware.memory, "_HEAP_THRESHOLD_BYTES", _SMALLEST_COUNTED_BYTES),
        mock.patch.object(lmswap.session.session, "device_memory", TensorMemory),
    ):
        memory = TensorMemory(torch.device("cpu"))
        try:
            yield memory
        finally:
            memory.close()
