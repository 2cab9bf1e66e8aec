"""torch's caching allocator of GPU memory, and its streams.

A torch without CUDA lacks these functions: they are looked up when called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def memory_stats(device_index: int) -> dict[str, Any]:
    """Return the counters of one GPU; torch.cuda.memory_stats builds a sorted table of all 130 first, in 0.1 ms."""
    return torch._C._cuda_memoryStats(device_index)


def pool_segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the segments of one memory pool, each with its blocks.

    torch 2.11 to 2.13 drops a reference that it does not own to each number passed (pytorch#196366): those of
    pools after the 256th are separate objects, which would be freed twice, crashing the process later.
    """
    for number in pool:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    segments: list[dict[str, Any]] = torch._C._cuda_memorySnapshot(pool)["segments"]
    return segments


def raw_functions() -> tuple[Callable[[int, int], int], Callable[[int], None]]:
    """Return the functions that allocate bytes for a stream, and free them."""
    return torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete


def raw_stream_function() -> Callable[[int], int]:
    """Return a function from a device index to its current stream; torch.cuda.current_stream takes 7 µs."""
    return torch._C._cuda_getCurrentRawStream


def allocator_settings() -> dict[str, Any]:
    """Return the settings of torch's own allocator, from PYTORCH_CUDA_ALLOC_CONF; other allocators raise."""
    settings: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return settings


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Let ``observer`` be called, for good, before an allocation raises: with the device's index first."""
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


def is_history_recorded() -> bool:
    """Return whether the process records the allocator's events."""
    return torch._C._cuda_isHistoryEnabled()


def record_history(max_entries: int) -> None:
    """Record the allocator's events of the process from now on, without stack traces."""
    record: Callable[..., None] = torch.cuda.memory._record_memory_history
    record("all", context=None, max_entries=max_entries, clear_history=True)


def end_history() -> None:
    """Record no more events, and forget those recorded."""
    record: Callable[..., None] = torch.cuda.memory._record_memory_history
    record(None, clear_history=True)


def recorded_events(device: torch.device) -> list[dict[str, Any]]:
    """Return the recorded events of ``device``, oldest first."""
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
    return events
