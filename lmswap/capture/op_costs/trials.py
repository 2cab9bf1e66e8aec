"""Time, scratch memory and repeatability of one op, from a few runs on a CPU or a GPU.

On a CPU by the clock. On a GPU a launch and the wait for it take longer than most kernels: launches are queued between
events, each after a fill of twice the L2 cache, so that it finds as little there as in the middle of a step, and after
more fills where the device would otherwise finish one before the host has queued the whole op.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lmswap.hardware.memory import DeviceMemory
from lmswap.torch_compat.pytree import tensors
from lmswap.verify.bitwise import bitwise_equal

# First runs also pay for the first access to memory: on two cores of a virtual machine the backward of a convolution at
# 128³ took 0.63 s, then 0.25 s twice. Two runs are enough where an op takes longer than this; ops of microseconds need
# a warm cache, too.
_TWICE_FROM_SECONDS = 0.05
_REPEATS = 3
_CLOSE = 0.9  # a run that takes at least this share of the previous one was warm
_MAX_FILLS = 64  # before a launch: 2 ms of an H100; an op that waits for the device is never queued in time
_HOST_MARGIN = 3  # factor on the host's measured time


@dataclass(frozen=True)
class Trial:
    """The results of an op's runs."""

    seconds: float
    scratch_bytes: int
    made: list[torch.Tensor]
    repeats: bool  # results were bitwise identical each time; assumed on a CPU


def time_on_cpu(run: Callable[[], Any], meter: DeviceMemory, *, is_timed: bool = True) -> Trial:
    """Run an op on the CPU twice, and a third time if the second was faster and short; once unless ``is_timed``."""
    best, scratch = float("inf"), 0
    made: list[torch.Tensor] = []
    for repeat in range(_REPEATS if is_timed else 1):
        made.clear()
        meter.synchronize()
        meter.reset_tensor_peak()
        start = time.perf_counter()
        made = tensors(run())
        meter.synchronize()
        seconds = time.perf_counter() - start
        scratch = max(scratch, meter.peak_tensor_bytes() - meter.used_tensor_bytes())
        is_warm = seconds >= _CLOSE * best or seconds > _TWICE_FROM_SECONDS
        best = min(best, seconds)
        if repeat and is_warm:
            break
    return Trial(best, max(scratch, 0), made, repeats=True)


def time_on_gpu(
    run: Callable[[], Any], meter: DeviceMemory, device: torch.device, *, compared: Callable[[torch.Tensor], bool]
) -> Trial:
    """Run an op on a GPU: to warm up, for its memory, in another thread, and then for its time.

    Args:
        run: runs it once.
        meter: of the device's memory.
        device: the GPU.
        compared: whether a result must be bitwise identical each time.
    """
    first = tensors(run())  # also selects kernels, and may try some that take more memory than the one selected
    meter.synchronize()
    meter.reset_tensor_peak()
    start = time.perf_counter()
    made = tensors(run())
    host_seconds = time.perf_counter() - start
    meter.synchronize()
    is_long = time.perf_counter() - start > _TWICE_FROM_SECONDS
    scratch = meter.peak_tensor_bytes() - meter.used_tensor_bytes()
    repeats = _are_same(first, made, compared)
    del made
    if repeats:  # libraries select kernels in each thread, and autograd runs backward in its own
        again = tensors(_in_autograds_thread(run, device))
        meter.synchronize()
        repeats = _are_same(first, again, compared)
        del again
    seconds = seconds_by_events(run, device, 1 if is_long else _REPEATS, host_seconds)
    return Trial(seconds, max(scratch, 0), first, repeats)


def seconds_by_events(run: Callable[[], Any], device: torch.device, num_launches: int, host_seconds: float) -> float:
    """Return the op's seconds on the device, without the ``host_seconds`` for queueing it."""
    fill = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    fill_seconds = _between_events(fill.zero_)()
    num_fills = min(_MAX_FILLS, 1 + int(_HOST_MARGIN * host_seconds / max(fill_seconds, 1e-6)))
    launches = []
    for _ in range(num_launches):
        for _ in range(num_fills):
            fill.zero_()
        launches.append(_between_events(run))
    return statistics.median(seconds() for seconds in launches)


def _between_events(run: Callable[[], Any]) -> Callable[[], float]:
    """Queue ``run`` between two events; return a function that waits for them and returns the seconds between."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()

    def seconds() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return seconds


def _in_autograds_thread(run: Callable[[], Any], device: torch.device) -> Any:
    """Return ``run()`` from the thread that runs a backward on ``device``.

    In any other thread, memory that libraries allocate per thread would be leaked: 32 MiB for cuBLAS on an H200.
    """
    made: list[Any] = []
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.zeros((), device=device, requires_grad=True)
        backward: Callable[..., torch.Tensor] = _CallInBackward.apply
        backward(start, lambda: made.append(run())).backward()  # type: ignore[no-untyped-call]
    return made.pop()


class _CallInBackward(torch.autograd.Function):
    """Calls a function when the backward reaches it."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return start.view_as(start)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            ctx.call()
        return gradients[0], None


def _are_same(some: list[torch.Tensor], others: list[torch.Tensor], compared: Callable[[torch.Tensor], bool]) -> bool:
    return all(bitwise_equal(a, b) for a, b in zip(some, others, strict=True) if compared(a))
