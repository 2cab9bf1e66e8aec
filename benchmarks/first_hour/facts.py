"""Facts of the machine, and the cost of the calls that a step makes: ``python -m benchmarks.first_hour.facts``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.compact import to_json
from benchmarks.unet3d.files import write_text
from lmswap.hardware.cublas_workspace import allocate_cublas_workspaces
from lmswap.hardware.device import describe_device
from lmswap.hardware.launch_overhead import measure_host
from lmswap.runtime import _C

_CALLS = 1000
_PINNED_BYTES = 2**30


def facts() -> dict[str, Any]:
    """Device bytes in use before the first tensor, microseconds of calls, and rates of pinning, by name."""
    device = torch.device("cuda", 0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # makes the context
    reserved_bytes = torch.cuda.memory_reserved(device)
    before = torch.cuda.memory_allocated(device)
    allocate_cublas_workspaces(device)
    return {
        "device": describe_device(device).name,
        "total_bytes": total_bytes,
        "used_by_contexts_bytes": total_bytes - free_bytes - reserved_bytes,  # of all processes
        "workspaces_bytes": torch.cuda.memory_allocated(device) - before,
        "l2_bytes": torch.cuda.get_device_properties(device).L2_cache_size,
        "microseconds": _microseconds(device) | _queueing(device),
        "pinned_bytes_per_second": _pinned_bytes_per_second(),
        "reserved_bytes_per_second": _reserved_bytes_per_second(),
    }


def _microseconds(device: torch.device) -> dict[str, float]:
    event, one = torch.cuda.Event(), torch.ones(1, device=device)
    event.record()
    found = {
        "memory_allocated": _per_call(lambda: torch.cuda.memory_allocated(device)),
        "make an event": _per_call(torch.cuda.Event),
        "record an event": _per_call(event.record),
        "launch a kernel": _per_call(lambda: one.add_(1)),
    }
    torch.cuda.synchronize()
    return {**found, "ask for an event": _per_call(event.query), "synchronize": _per_call(torch.cuda.synchronize)}


def _queueing(device: torch.device) -> dict[str, float]:
    """Host microseconds to queue an op and a copy, as plans count them."""
    host = measure_host(device, "host", "")
    return {"queue an op": 1e6 * host.op_seconds, "queue a copy": 1e6 * host.copy_seconds}


def _per_call(call: Callable[[], object]) -> float:
    """Microseconds of one call, the median of ten batches of calls."""
    runs = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(_CALLS // 10):
            call()
        runs.append((time.perf_counter() - started) / (_CALLS // 10))
    return statistics.median(runs) * 1e6


def _pinned_bytes_per_second() -> float:
    started = time.perf_counter()
    torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    return _PINNED_BYTES / (time.perf_counter() - started)


def _reserved_bytes_per_second() -> float:
    """Bytes per second at which lmswap's host tier reserves pinned memory."""
    engine = _C.Engine(driver="cuda")
    try:
        engine.open_host_tier(_PINNED_BYTES)
        engine.reserve("host", _PINNED_BYTES)
        return _PINNED_BYTES / engine.tier_stats("host").reserve_seconds
    finally:
        engine.close()


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), to_json(facts()))
