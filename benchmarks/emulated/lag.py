"""The lag behind the host of a device that must wait for it, and of one that need not.

A chain of small ops, whose kernels the emulated GPU makes last longer and longer: for each length the median, over some
steps, of how busy the device was in the forward, and of its lag when that was queued, as shares of the forward.
``.venv-gpu/bin/python -m benchmarks.emulated.lag``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import lmswap
from lmswap import api
from lmswap.ir.machine import Link, Machine, Rate, Tier
from tools.emulated_gpu import machine
from tools.emulated_gpu.measured import store_as_measured

_OPS = 60
_KERNEL_SECONDS = (0.0, 1e-4, 2e-4, 3e-4, 4e-4, 6e-4, 1e-3, 2e-3, 4e-3)
_WARM_UP_STEPS, _STEPS = 6, 9


def study(cache: Path) -> list[tuple[float, float, float]]:
    """(seconds of a kernel, busy share, lag share) for each kernel length; shares are of the segment's time."""
    machine.start()
    link = Link(Rate.constant(2e9), Rate.constant(2e9))
    store_as_measured(
        Machine("emulated", machine.capacity_bytes(), 5e10, 1e10, 1e-5, (Tier("host", 2**34, link),)), cache
    )
    model = lmswap.enable(nn.Sequential(nn.Linear(8, 8), *(nn.Tanh() for _ in range(_OPS))).cuda(), policy="none")
    recorder, x = api._session(model).recorder, torch.ones(8, 8, device="cuda")

    def forward() -> tuple[float, float]:
        model(x).sum().backward()
        torch.cuda.synchronize()
        record = recorder.last()
        assert record is not None
        run = record.segments[0]
        return run.end - run.start, run.end - run.queued_seconds

    for _ in range(_WARM_UP_STEPS):
        forward()
    found = []
    for seconds in _KERNEL_SECONDS:
        machine.configure_compute(latency_seconds=seconds)
        steps = [forward() for _ in range(_STEPS)]
        busy = statistics.median(_OPS * seconds / length for length, _ in steps)
        found.append((seconds, busy, statistics.median(lag / length for length, lag in steps)))
    return found


def main() -> int:
    """Prints a table of `study`; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("| kernel, ms | busy | lag |\n|---|---|---|\n")
        for seconds, busy, lag in study(Path(folder)):
            sys.stdout.write(f"| {1e3 * seconds:.1f} | {busy:.2f} | {lag:.3f} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
