"""GPU activity of a steady step, by Kineto: kernels, copies, idle time, and kernels slowed down during copies."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmswap.profiling.intervals import Intervals, clip, intersect, length, subtract, union

_STEPS = 2
_LONGEST = 15  # kernels that are listed by name


def record_kernels(step: Callable[[], object], path: Path) -> dict[str, Any]:
    """Run two steps under torch.profiler, keep their trace as ``path``.gz, and return the figures of one.

    Where the device cannot be traced, as an emulated one, they are empty but for the "failure".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    step()
    torch.cuda.synchronize()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(_STEPS):
                step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
    except RuntimeError as error:
        return {"failure": str(error)}
    text = path.read_text()
    path.unlink()
    with gzip.open(f"{path}.gz", "wt") as file:
        file.write(text)
    return kernel_figures(json.loads(text)["traceEvents"], _STEPS)


def kernel_figures(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Figures of one of ``steps`` steps, in seconds, from Kineto's events.

    ``idle_seconds`` is time without a kernel, ``idle_copying_seconds`` the part of it in which a copy between host and
    device runs. ``slowed_seconds`` is how much longer kernels took beside copies than kernels of the same name and grid
    that ran alone in these steps, and ``compared_seconds`` the time of the kernels that had such a twin.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return {}
    memcpy = [event for event in events if event.get("cat") == "gpu_memcpy"]
    copies = {way: [event for event in memcpy if way in str(event.get("name"))] for way in ("HtoD", "DtoH")}
    busy = _covered(kernels)
    start, end = float(busy[0, 0]), float(busy[-1, 1])
    copying = clip(_covered([*copies["HtoD"], *copies["DtoH"]]), start, end)
    idle = subtract(np.array([[start, end]]), busy)
    slowed, compared = _slowed(kernels, copying)
    by_name: dict[str, float] = defaultdict(float)
    for event in kernels:
        by_name[str(event["name"])] += float(event["dur"])
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:_LONGEST]
    return {
        "num_kernels": len(kernels) / steps,
        "kernel_seconds": sum(float(event["dur"]) for event in kernels) / steps * 1e-6,
        "busy_seconds": length(busy) / steps * 1e-6,
        "idle_seconds": length(idle) / steps * 1e-6,
        "idle_copying_seconds": length(intersect(idle, copying)) / steps * 1e-6,
        "copying_seconds": length(copying) / steps * 1e-6,
        "slowed_seconds": slowed / steps * 1e-6,
        "compared_seconds": compared / steps * 1e-6,
        "copies": {way: _rates(events, steps) for way, events in copies.items()},
        "longest": {name[:120]: microseconds / steps * 1e-6 for name, microseconds in longest},
    }


def _covered(events: Iterable[Mapping[str, Any]]) -> Intervals:
    return union([(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events])


def _slowed(kernels: Sequence[Mapping[str, Any]], copying: Intervals) -> tuple[float, float]:
    """Microseconds by which kernels beside copies took longer than their like alone, and which these took in all."""
    alone: dict[Any, list[float]] = defaultdict(list)
    beside: dict[Any, list[float]] = defaultdict(list)
    for event in kernels:
        seconds = float(event["dur"])
        kind = (event["name"], str(event.get("args", {}).get("grid")))
        share = length(clip(copying, float(event["ts"]), float(event["ts"]) + seconds)) / max(seconds, 1e-9)
        if share < 0.05:
            alone[kind].append(seconds)
        elif share > 0.95:
            beside[kind].append(seconds)
    pairs = [(times, statistics.median(alone[kind])) for kind, times in beside.items() if kind in alone]
    slowed = sum(sum(times) - len(times) * usual for times, usual in pairs)
    return slowed, sum(sum(times) for times, _ in pairs)


def _rates(copies: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    nbytes = sum(int(event.get("args", {}).get("bytes", 0)) for event in copies)
    seconds = sum(float(event["dur"]) for event in copies) * 1e-6
    return {
        "num": len(copies) / steps,
        "bytes": nbytes / steps,
        "bytes_per_second": nbytes / seconds if seconds else 0.0,
    }
