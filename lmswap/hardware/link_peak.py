"""Peak rates of a GPU's host link, measured with large copies as by NVIDIA's nvbandwidth (memcpy.cpp).

Pinned memory, 512 MiB a copy, 4 copies to warm up, 16 back to back between two events, the median of 3; both ways at
once with the opposite stream moving twice as much, of which only the measured one counts. Two things differ: the copies
are queued behind the warm-up copies, which take longer than the queueing, instead of behind a kernel that spins; and
the process is not moved to the GPU's NUMA node.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmswap.errors import TierError
from lmswap.hardware.microbench import convolution
from lmswap.ir.bytesize import format_bytes

if TYPE_CHECKING:
    import torch

_COPY_BYTES = 2**29
_WARM_UP_COPIES = 4
_COPIES = 16
_SAMPLES = 3


@dataclass(frozen=True)
class PeakRate:
    """One direction, in bytes per second: alone, while the other runs, and while a convolution runs.

    ``compute_factor`` is the share of its speed that the convolution keeps meanwhile.
    """

    bytes_per_second: float
    both_bytes_per_second: float
    busy_bytes_per_second: float
    compute_factor: float


def peak_rates(device: torch.device) -> tuple[PeakRate, PeakRate]:
    """Peak rates between the CUDA device and pinned host memory; takes 1 GiB of both and some seconds.

    Returns:
        The rates out and in.

    Raises:
        TierError: the memory cannot be allocated, or CUDA failed.
    """
    try:
        out = _Copies(device, source=_device_buffer(device), target=_pinned_buffer())
        into = _Copies(device, source=_pinned_buffer(), target=_device_buffer(device))
        compute = convolution(device)
        compute(1)
    except RuntimeError as error:  # torch raises it for both memories
        raise TierError(
            f"the host link cannot be measured by copies of {format_bytes(_COPY_BYTES)}: {error}"
        ) from error
    return _peak(device, out, into, compute), _peak(device, into, out, compute)


class _Copies:
    """Copies in one direction, on their stream."""

    def __init__(self, device: torch.device, source: torch.Tensor, target: torch.Tensor) -> None:
        import torch

        self._source, self._target = source, target
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def queue(self, count: int) -> None:
        """Queues the warm-up and ``count`` copies; returns at once."""
        import torch

        begin, end = self._events
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_COPIES):
                self._target.copy_(self._source, non_blocking=True)
            begin.record()
            for _ in range(count):
                self._target.copy_(self._source, non_blocking=True)
            end.record()

    def seconds(self) -> float:
        """Waits for the last `queue`; its seconds without the warm-up."""
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _peak(device: torch.device, measured: _Copies, opposite: _Copies, compute: Callable[[int], float]) -> PeakRate:
    import torch

    def sample(overlapped: Callable[[], None]) -> float:
        torch.cuda.synchronize(device)
        overlapped()
        measured.queue(_COPIES)
        return measured.seconds()

    def median(overlapped: Callable[[], None]) -> float:
        return statistics.median(sample(overlapped) for _ in range(_SAMPLES))

    alone_seconds = median(lambda: None)
    both_seconds = median(lambda: opposite.queue(2 * (_COPIES + _WARM_UP_COPIES)))
    busy_seconds, compute_factor = _while_computing(device, measured, compute, alone_seconds)
    moved_bytes = _COPIES * _COPY_BYTES
    return PeakRate(moved_bytes / alone_seconds, moved_bytes / both_seconds, moved_bytes / busy_seconds, compute_factor)


def _while_computing(
    device: torch.device, measured: _Copies, compute: Callable[[int], float], alone_seconds: float
) -> tuple[float, float]:
    """Seconds of the copies while ``compute`` runs, and the share of its speed that ``compute`` keeps."""
    import torch

    torch.cuda.synchronize(device)
    run_seconds = compute(_SAMPLES) / _SAMPLES
    # Longer than the copies with their warm-up, if these lose up to half.
    num_runs = math.ceil(2 * alone_seconds * (1 + _WARM_UP_COPIES / _COPIES) / run_seconds) + 1
    found = []
    for _ in range(_SAMPLES):
        measured.queue(_COPIES)
        compute_seconds = compute(num_runs)
        copy_seconds = measured.seconds()
        copying_seconds = copy_seconds * (1 + _WARM_UP_COPIES / _COPIES)
        lost_seconds = compute_seconds - num_runs * run_seconds
        found.append((copy_seconds, min(1.0, max(0.0, 1 - lost_seconds / copying_seconds))))
    return statistics.median(copy for copy, _ in found), statistics.median(kept for _, kept in found)


def _pinned_buffer() -> torch.Tensor:
    import torch

    return torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)


def _device_buffer(device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
