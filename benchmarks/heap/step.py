"""Trains a few steps of the 3D U-Net on random cubes and prints one JSON line: `python -m benchmarks.heap.step`."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass

import torch

from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.network import UNet3d
from benchmarks.unet3d.recipe import make_optimizer
from lmswap.hardware.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from lmswap.runtime import _C

LIBRARIES = ["libc10.so", "libtorch_cpu.so"]


@dataclass(frozen=True)
class StepRun:
    """One process. Lists have an item per step; resident bytes are growth since before the first step."""

    seconds: list[float]
    system_seconds: list[float]
    faults: list[int]
    peak_resident_bytes: int
    peak_live_bytes: int  # 0 without the heap, the only one that knows
    num_fresh_pages: int
    loss: float


def train(size: int, num_steps: int, threshold_bytes: int) -> StepRun:
    """Trains on one cube of side ``size``; a threshold of 0 leaves torch as it is."""
    torch.manual_seed(0)
    if threshold_bytes > 0:
        _C.heap_install(threshold_bytes, LIBRARIES)
    model = UNet3d()
    optimizer = make_optimizer(model.parameters())
    x = torch.randn(1, 4, size, size, size)
    truth = (torch.rand(1, 3, size, size, size) > 0.5).float()
    base_bytes = resident_bytes()
    reset_peak_resident()
    seconds, system_seconds, faults = [], [], []
    for _ in range(num_steps):
        usage, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        optimizer.zero_grad()
        loss = weighted_dice_loss(model(x), truth)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        used = resource.getrusage(resource.RUSAGE_SELF)
        system_seconds.append(used.ru_stime - usage.ru_stime)
        faults.append(used.ru_minflt - usage.ru_minflt)
    stats = _C.heap_stats()
    return StepRun(
        seconds=seconds,
        system_seconds=system_seconds,
        faults=faults,
        peak_resident_bytes=peak_resident_bytes() - base_bytes,
        peak_live_bytes=stats.peak_live_bytes,
        num_fresh_pages=stats.num_fresh_pages,
        loss=loss.item(),
    )


def main() -> None:
    """Reads the size, the number of steps and the heap's threshold from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", type=int)
    parser.add_argument("num_steps", type=int)
    parser.add_argument("threshold_bytes", type=int)
    arguments = parser.parse_args()
    run = train(arguments.size, arguments.num_steps, arguments.threshold_bytes)
    json.dump(asdict(run), sys.stdout)


if __name__ == "__main__":
    main()
