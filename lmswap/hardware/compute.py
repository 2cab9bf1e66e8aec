"""Something to compute while copies are measured: a convolution like those of a 3D network."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CHANNELS = 32
# 18 ms on two cores at 340 GFLOP/s; 4 ms on an H200 at 30 TFLOP/s.
_SIDE = {"cpu": 48, "cuda": 128}


def convolution(device: torch.device) -> Callable[[int], float]:
    """A function that runs a 3 × 3 × 3 convolution so many times on ``device`` and says how many seconds that took."""
    import torch

    side = _SIDE[device.type]
    image = torch.ones(1, _CHANNELS, side, side, side, device=device)
    weight = torch.ones(_CHANNELS, _CHANNELS, 3, 3, 3, device=device)

    def run(count: int) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            for _ in range(count):
                torch.nn.functional.conv3d(image, weight, padding=1)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # not the device: copies may take longer
        return time.perf_counter() - started

    return run
