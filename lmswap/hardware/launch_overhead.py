"""Launch overhead: the host's seconds to queue an op and a copy on a GPU, measured with tiny ops and copies.

The host does not wait for the device meanwhile: measured work is queued, and may run later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmswap.ir.machine import Host

if TYPE_CHECKING:
    import torch

    from lmswap.runtime.engine import SwapEngine

# Together fewer than the 1,024 entries of a CUDA queue: a full one makes the host wait for the device.
_OPS, _ROUND_TRIPS = 200, 32
_REPEATS = 9
_COPY_BYTES = 4096  # of a copy: negligible


def measure_host(device: torch.device, tier: str, where: str) -> Host:
    """Measures the launch overhead on ``device``, a GPU, with copies to ``tier`` at ``where``; takes 0.1 s.

    Raises:
        TierError: the tier is not available.
        DriverError: the device's driver failed.
    """
    import torch

    from lmswap.hardware.memory import device_memory
    from lmswap.runtime import _C
    from lmswap.runtime.engine import SwapEngine
    from lmswap.runtime.tiers import open_tier

    native = _C.Engine(driver="cuda", device=device.index or 0)
    engine = SwapEngine(device, native, device_memory(device), tier=tier, describe=lambda buffer: (str(buffer), ""))
    small = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    try:
        open_tier(native, tier, _ROUND_TRIPS * _COPY_BYTES, where)
        native.reserve(tier, _ROUND_TRIPS * _COPY_BYTES)
        op_seconds = _seconds(device, lambda: _run_ops(small)) / _OPS
        copy_seconds = _seconds(device, lambda: _make_round_trips(engine, tier, small)) / (2 * _ROUND_TRIPS)
    finally:
        engine.close()
    return Host(op_seconds, copy_seconds)


def _seconds(device: torch.device, queue: Callable[[], object]) -> float:
    """Median seconds of ``queue`` on an idle device."""
    import torch

    seconds = []
    for _ in range(1 + _REPEATS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        queue()
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize(device)
    return statistics.median(seconds[1:])  # the first one warms up


def _run_ops(small: torch.Tensor) -> None:
    for _ in range(_OPS):
        small.add(small)


def _make_round_trips(engine: SwapEngine, tier: str, x: torch.Tensor) -> None:
    """Copies ``x`` out and in with the ops of graphs."""
    from lmswap.runtime import ops

    kernels = (ops.swap_out_start, ops.swap_out_wait, ops.swap_in_start, ops.swap_in_wait, ops.view_bytes)
    out_start, out_done, in_start, in_done, view_bytes = (ops.COPIES[kernel] for kernel in kernels)
    shape, stride = list(x.shape), list(x.stride())
    for number in range(_ROUND_TRIPS):
        token = out_start(x, engine.number, 0, tier, number * _COPY_BYTES, None, x.dtype, shape, stride)
        out_done(token, x, engine.number)
        flat = in_start(token, engine.number, 0, _COPY_BYTES, x.device)
        flat = in_done(flat, token, engine.number)
        view_bytes(flat, x.dtype, shape, stride, 0, False, False)
    engine.native.take_records()
