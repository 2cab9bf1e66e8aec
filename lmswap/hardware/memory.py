"""Memory of a device as its budget counts it, current and peak: one interface for CUDA and the CPU.

On CUDA it is what torch has reserved. On the CPU it is the growth of the process's resident memory, as the kernel
counts it, and tensor bytes are those of the recycling heap that serves torch's large allocations meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from lmswap.hardware.device import describe_device
from lmswap.hardware.host_memory import (
    peak_resident_bytes,
    read_host_memory,
    release_free_memory,
    reset_peak_resident,
    resident_bytes,
)
from lmswap.hardware.peak_tracker import PeakTracker, Watch

if TYPE_CHECKING:
    import torch

# The libraries that allocate torch's large blocks: its CPU allocator, and oneDNN's scratch inside libtorch_cpu.
_HEAP_LIBRARIES = ["libc10.so", "libtorch_cpu.so"]
# Memory of glibc is in no prediction, and adds to that of tensors even at its minimum. With
# 1 MiB instead steps took as long, but peaks of a small U-Net in bf16 at 70 % were 339 MiB instead of 323, of a GPT 516
# instead of 500, and predicted within 7 and 3 MiB instead of 1 and 0.1; from 16 to 128 KiB all is the same.
_HEAP_THRESHOLD_BYTES = 64 * 2**10


class DeviceMemory(Protocol):
    """The memory of one device as its budget counts it. Peaks are since they were restarted, or construction.

    The defaults are those of a device whose memory the process does not grow into: of CUDA.
    """

    def description(self) -> str:
        """The device in messages: "cuda:0 (NVIDIA H200)"."""

    def total_bytes(self) -> int:
        """All memory that the device has, or that this process may use of it."""

    def free_bytes(self) -> int:
        """Bytes that this process could still allocate in addition to `used_bytes`."""

    def used_bytes(self) -> int:
        """Bytes that count against the budget now."""

    def used_tensor_bytes(self) -> int:
        """The part of `used_bytes` that tensors hold now."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Context in which the process may grow without counting against the budget; not on CUDA, where all counts."""
        return nullcontext()

    def count(self, nbytes: int) -> None:
        """Counts memory that the process had before, as if it had grown by it, trims, and restarts the peaks.

        On CUDA all counts anyway.
        """
        self.trim()
        self.reset_tensor_peak()
        self.lap_peaks(restart=True)

    def excluded_bytes(self) -> int:
        """Bytes that the process holds in addition to `used_bytes`: the rest of its resident memory; 0 on CUDA."""
        return 0

    def min_counted_bytes(self) -> int:
        """Smallest tensor that `used_tensor_bytes` counts: memory of smaller ones remains in use for later ones."""
        return 0

    def peak_tensor_bytes(self) -> int:
        """The highest `used_tensor_bytes`."""

    def reports_changes(self) -> bool:
        """Whether `tensor_changes` reports all changes."""
        return False

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> Sequence[tuple[float, int]]:
        """(seconds, `used_tensor_bytes`) at each change between two times of CLOCK_MONOTONIC.

        Empty where the host allocates ahead of the device: the times would not be those of use.
        """
        return ()

    def reset_tensor_peak(self) -> None:
        """Restarts `peak_tensor_bytes` from the current value; those of laps continue."""

    def lap_peaks(self, *, restart: bool = False) -> tuple[int, int]:
        """The highest `used_bytes` and `used_tensor_bytes` of a lap; ``restart`` begins the next, for these peaks."""

    def lap_tensor_peak_bytes(self) -> int:
        """The highest `used_tensor_bytes` of the lap: on a CPU without a read of /proc, which takes 20 µs."""

    def reusable_bytes(self) -> int:
        """The part of `used_bytes` that no tensor holds and that later tensors will reuse."""

    def other_bytes(self) -> int:
        """The part of `used_bytes` beside tensors and memory that they reuse: code, traces. 0 on CUDA: it has none."""
        return 0

    def trim(self) -> None:
        """Releases memory cached for reuse; allocating it again costs the next step about half its time."""

    def decommit(self, nbytes: int) -> None:
        """Decommits up to ``nbytes`` of the memory cached for reuse, for host work that needs main memory now."""
        return

    def compact(self) -> None:
        """Releases memory that planning freed; memory that tensors will reuse is kept."""
        return

    def collect(self) -> None:
        """Collects Python's reference cycles, then compacts."""
        return

    def synchronize(self) -> None:
        """Waits until the device has run all queued work."""
        return

    def close(self) -> None:
        """Ends the counting. Idempotent."""


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of ``device``."""
    return CudaMemory(device) if device.type == "cuda" else CpuMemory(device)


_RESIDENT = PeakTracker(peak_resident_bytes, reset_peak_resident)


@cache
def _live() -> PeakTracker:
    """Peaks of bytes allocated on the heap."""
    from lmswap.runtime import _C

    return PeakTracker(lambda: _C.heap_stats().peak_live_bytes, _C.heap_reset_peak)


@cache
def _allocated(device: torch.device) -> PeakTracker:
    """Peaks of bytes that torch has allocated on a GPU."""
    import torch

    return PeakTracker(
        lambda: torch.cuda.max_memory_allocated(device), lambda: torch.cuda.reset_peak_memory_stats(device)
    )


class CudaMemory(DeviceMemory):
    """Bytes reserved by torch's caching allocator on one GPU: more than tensors hold, and what the card must have.

    Peaks of reserved bytes are sampled, since they only shrink where the cache is emptied. So are those of tensors,
    except `peak_tensor_bytes`, which resets torch's public peak counter and is for first steps only.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        from lmswap.runtime.arena import unused_arena_bytes
        from lmswap.torch_compat.caching_allocator import memory_stats

        self._cuda, self._stats, self._device = torch.cuda, memory_stats, device
        self._held_bytes = partial(unused_arena_bytes, device)
        self._tensor_peak = _allocated(device).watch()
        self.trim()  # memory cached by an earlier training is no part of the first step
        self._lap_peak_bytes = self._lap_peak_tensor_bytes = 0

    def description(self) -> str:
        """See `DeviceMemory`; so are the others."""
        return str(describe_device(self._device))

    def total_bytes(self) -> int:  # noqa: D102
        share = self._cuda.get_per_process_memory_fraction(self._device)
        return int(share * self._cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:  # noqa: D102
        allowed_bytes = self.total_bytes() - self._now("reserved_bytes")
        return min(int(self._cuda.mem_get_info(self._device)[0]), allowed_bytes)

    def used_bytes(self) -> int:  # noqa: D102
        used_bytes = self._now("reserved_bytes")
        self._lap_peak_bytes = max(self._lap_peak_bytes, used_bytes)
        return used_bytes

    def used_tensor_bytes(self) -> int:  # noqa: D102
        tensor_bytes = self._now("allocated_bytes") - self._held_bytes()
        self._lap_peak_tensor_bytes = max(self._lap_peak_tensor_bytes, tensor_bytes)
        return tensor_bytes

    def peak_tensor_bytes(self) -> int:  # noqa: D102
        return self._tensor_peak.value()

    def reset_tensor_peak(self) -> None:  # noqa: D102
        self._tensor_peak.restart()

    def lap_peaks(self, *, restart: bool = False) -> tuple[int, int]:  # noqa: D102
        self.used_bytes()
        self.used_tensor_bytes()
        peaks = self._lap_peak_bytes, self._lap_peak_tensor_bytes
        if restart:
            self._lap_peak_bytes = self._lap_peak_tensor_bytes = 0
        return peaks

    def lap_tensor_peak_bytes(self) -> int:  # noqa: D102
        self.used_tensor_bytes()
        return self._lap_peak_tensor_bytes

    def reusable_bytes(self) -> int:  # noqa: D102
        return self._now("reserved_bytes") - self._now("allocated_bytes")

    def trim(self) -> None:  # noqa: D102
        self._cuda.empty_cache()

    def synchronize(self) -> None:  # noqa: D102
        self._cuda.synchronize(self._device)

    def close(self) -> None:  # noqa: D102
        self._tensor_peak.stop()

    def _now(self, figure: str) -> int:
        return int(self._stats(self._device.index or 0)[figure]["all"]["current"])


class CpuMemory(DeviceMemory):
    """Growth of the process since construction; the heap serves torch while an instance is open."""

    _num_open = 0  # the heap is per process: installed by the first, removed by the last

    def __init__(self, device: torch.device) -> None:
        from lmswap.runtime import _C

        self._heap, self._device, self._is_open = _C, device, True
        self._watches: list[Watch] = []
        _C.heap_install(_HEAP_THRESHOLD_BYTES, _HEAP_LIBRARIES)
        CpuMemory._num_open += 1
        try:
            self.trim()  # free memory would hide as much growth when it is released later
            self._base_bytes = resident_bytes()
            # Tensors of an earlier model are resident, too: else they would be a part of a peak that leaves them out.
            self._base_tensor_bytes = _C.heap_stats().live_bytes
            self._lap_peak = self._watch(_RESIDENT)
            self._tensor_peak, self._lap_tensor_peak = self._watch(_live()), self._watch(_live())
        except BaseException:
            self.close()
            raise

    def description(self) -> str:
        """See `DeviceMemory`; so are the others."""
        return str(describe_device(self._device))

    def total_bytes(self) -> int:  # noqa: D102
        return read_host_memory().total_bytes

    def free_bytes(self) -> int:  # noqa: D102
        return read_host_memory().available_bytes

    def used_bytes(self) -> int:  # noqa: D102
        return max(0, resident_bytes() - self._base_bytes)

    def used_tensor_bytes(self) -> int:  # noqa: D102
        return max(0, self._heap.heap_stats().live_bytes - self._base_tensor_bytes)

    @contextmanager
    def uncounted(self) -> Iterator[None]:  # noqa: D102
        self.trim()
        before_bytes = resident_bytes()
        with ExitStack() as peaks:
            for watch in self._watches:
                peaks.enter_context(watch.paused())
            try:
                yield
            finally:
                self.trim()
                self._base_bytes += max(0, resident_bytes() - before_bytes)

    def count(self, nbytes: int) -> None:  # noqa: D102
        self._base_bytes -= nbytes
        self._base_tensor_bytes = max(0, self._base_tensor_bytes - nbytes)
        super().count(nbytes)

    def excluded_bytes(self) -> int:  # noqa: D102
        return self._base_bytes

    def min_counted_bytes(self) -> int:  # noqa: D102
        return _HEAP_THRESHOLD_BYTES

    def peak_tensor_bytes(self) -> int:  # noqa: D102
        return max(0, self._tensor_peak.value() - self._base_tensor_bytes)

    def reports_changes(self) -> bool:  # noqa: D102
        return True

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> Sequence[tuple[float, int]]:  # noqa: D102
        changes = self._heap.heap_changes(start_seconds, stop_seconds)
        return [(seconds, max(0, live_bytes - self._base_tensor_bytes)) for seconds, live_bytes in changes]

    def reset_tensor_peak(self) -> None:  # noqa: D102
        self._tensor_peak.restart()

    def lap_peaks(self, *, restart: bool = False) -> tuple[int, int]:  # noqa: D102
        resident, tensors = self._lap_peak, self._lap_tensor_peak
        if restart:
            return max(0, resident.restart() - self._base_bytes), max(0, tensors.restart() - self._base_tensor_bytes)
        return max(0, resident.value() - self._base_bytes), max(0, tensors.value() - self._base_tensor_bytes)

    def lap_tensor_peak_bytes(self) -> int:  # noqa: D102
        return max(0, self._lap_tensor_peak.value() - self._base_tensor_bytes)

    def reusable_bytes(self) -> int:  # noqa: D102
        return self._heap.heap_reusable_bytes()

    def other_bytes(self) -> int:  # noqa: D102
        return self.used_bytes() - self.used_tensor_bytes() - self.reusable_bytes()

    def trim(self) -> None:  # noqa: D102
        self._heap.heap_trim()
        self.compact()

    def decommit(self, nbytes: int) -> None:  # noqa: D102
        self._heap.heap_lend(nbytes)

    def compact(self) -> None:
        """Releases free pages, of which planning 500 ops leaves some 20 MiB."""
        release_free_memory()

    def collect(self) -> None:
        """Collects unreferenced graphs, of which a replan of 4,400 ops leaves 20 MiB: takes 0.2 s."""
        gc.collect()
        self.compact()

    def _watch(self, tracker: PeakTracker) -> Watch:
        watch = tracker.watch()
        self._watches.append(watch)
        return watch

    def close(self) -> None:  # noqa: D102
        if self._is_open:
            self._is_open = False
            for watch in self._watches:
                watch.stop()
            CpuMemory._num_open -= 1
            if CpuMemory._num_open == 0:
                self._heap.heap_uninstall()
