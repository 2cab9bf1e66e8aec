"""Microbenchmark kernels whose size is chosen so that one run takes a few ms on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CHANNELS = 32
# 18 ms on two cores at 340 GFLOP/s; the largest takes 4 ms on an H200 at 30 TFLOP/s.
_SIDES = {"cpu": (48,), "cuda": (32, 64, 128)}
_MIN_SECONDS = 3e-3  # compared with it a launch, some 10 us, is negligible


def smallest_long_enough(sizes: Sequence[int], seconds_of: Callable[[int], float]) -> tuple[int, float]:
    """The first of ascending ``sizes`` that runs for `_MIN_SECONDS`, else the largest that fits in memory.

    Returns:
        The size, and the seconds of one run.

    Raises:
        torch.OutOfMemoryError: the first size does not fit.
    """
    import torch

    size, *larger = sizes
    seconds = seconds_of(size)
    for more in larger:
        if seconds >= _MIN_SECONDS:
            break
        try:
            seconds = seconds_of(more)
        except torch.OutOfMemoryError:  # a model fills the device, or others do
            break
        size = more
    return size, seconds


def convolution(device: torch.device) -> Callable[[int], float]:
    """A function from a number of runs of a convolution on ``device`` to the seconds they took.

    Filters are 3 × 3 × 3, as in 3D networks.
    """

    def seconds_of(side: int) -> float:
        run = _convolution(device, side)
        run(1)  # warms up
        return run(1)

    side, _ = smallest_long_enough(_SIDES[device.type], seconds_of)
    return _convolution(device, side)


def _convolution(device: torch.device, side: int) -> Callable[[int], float]:
    import torch

    image = torch.ones(1, _CHANNELS, side, side, side, device=device)
    weight = torch.ones(_CHANNELS, _CHANNELS, 3, 3, 3, device=device)

    def run(count: int) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            for _ in range(count):
                torch.nn.functional.conv3d(image, weight, padding=1)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # not the device, on which copies may still run
        return time.perf_counter() - started

    return run
