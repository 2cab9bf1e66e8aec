"""The memory of a training run, by one definition for swapped and plain runs alike.

On the CPU: what the process's resident memory grows by, as the kernel counts it, from the moment just before swapping
is enabled or the first step runs. On CUDA: what torch's allocator has reserved, which is what the card must have.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile


def import_lmswap() -> None:
    """Import what enabling a model and planning its steps import: modules are not what a budget is about."""
    importlib.import_module("lmswap.api")
    importlib.import_module("lmswap.planner").import_search()


class MeasurementError(Exception):
    """The system does not let this process measure its memory."""


class Meter(Protocol):
    """Measures one process from its creation on."""

    def now_bytes(self) -> int:
        """Bytes held now."""

    def peak_bytes(self) -> int:
        """Peak bytes since creation."""


class ResidentMeter:
    """Growth of resident memory: VmHWM, reset at creation, minus VmRSS at creation (proc(5), clear_refs 5).

    Raises:
        MeasurementError: /proc/self/clear_refs cannot be written, so an earlier peak could hide the one of interest.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise MeasurementError(
                f"cannot reset the peak of resident memory by writing 5 to /proc/self/clear_refs ({error}); "
                "run on Linux with /proc mounted, outside sandboxes that make it read-only"
            ) from error
        self.baseline_bytes = self._highest_bytes = _read_status()["VmRSS"]

    def now_bytes(self) -> int:
        """Bytes resident now above the baseline."""
        status = _read_status()
        # Kept because lmswap resets the kernel's peak when it plans: at most what came since the last call is lost.
        self._highest_bytes = max(self._highest_bytes, status["VmHWM"])
        return status["VmRSS"] - self.baseline_bytes

    def peak_bytes(self) -> int:
        """Peak of the bytes resident above the baseline."""
        self.now_bytes()
        return self._highest_bytes - self.baseline_bytes


class CudaMeter:
    """Bytes that torch's CUDA allocator has reserved, for all tensors of the process, and has allocated."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._highest_bytes = self._highest_reserved_bytes = 0

    def now_bytes(self) -> int:
        """Bytes that tensors hold now, as of the host's progress."""
        # Kept for the reason given at ResidentMeter.
        self._highest_bytes = max(self._highest_bytes, torch.cuda.max_memory_allocated())
        self._highest_reserved_bytes = max(self._highest_reserved_bytes, torch.cuda.max_memory_reserved())
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """Peak of the bytes reserved from the driver, fragmentation included: what must fit on the card."""
        self.now_bytes()
        return self._highest_reserved_bytes

    def tensor_peak_bytes(self) -> int:
        """Peak of the bytes in tensors, `torch.cuda.max_memory_allocated`."""
        self.now_bytes()
        return self._highest_bytes


class MemorySampler:
    """Reads a meter from a thread, every ``period_seconds``, between ``with`` and its end."""

    def __init__(
        self, meter: Meter, on_sample: Callable[[int], None] = lambda _: None, period_seconds: float = 0.01
    ) -> None:
        self._meter, self._on_sample, self._period_seconds = meter, on_sample, period_seconds
        self._samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, start_seconds: float, end_seconds: float) -> list[tuple[float, int]]:
        """The samples of a stretch of `time.perf_counter`, their times counted from its start."""
        return [(t - start_seconds, nbytes) for t, nbytes in self._samples if start_seconds <= t < end_seconds]

    def _run(self) -> None:
        while not self._stop.wait(self._period_seconds):
            nbytes = self._meter.now_bytes()
            self._samples.append((time.perf_counter(), nbytes))
            self._on_sample(nbytes)


def thin(samples: Sequence[tuple[float, int]], limit: int = 1000) -> tuple[tuple[float, int], ...]:
    """At most ``limit`` of the samples, the highest of each stretch, so that peaks stay what they are."""
    stride = -(-len(samples) // limit)
    stretches = (samples[start : start + stride] for start in range(0, len(samples), stride or 1))
    return tuple(max(stretch, key=lambda sample: sample[1]) for stretch in stretches)


def cpu_tensor_peak_bytes(step: Callable[[], object]) -> int:
    """Run one step and return the peak of the tensors it made, as requested from torch's CPU allocator.

    Tensors that exist before the step are not counted. The difference to resident memory is what kernels take as
    scratch and what allocator and kernel keep.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def _read_status() -> dict[str, int]:
    """Sizes in /proc/self/status by name, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[2:] == ["kB"]}
