"""Control of the emulated GPU from Python: kernels, link, capacity, faults, and the recorded violations.

What it is from the start is said by environment variables: device/settings.h.
"""

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_libraries = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
_driver: ctypes.CDLL | None = None
_kernels: ctypes.CDLL | None = None


def is_built() -> bool:
    """Whether this environment's CUDA libraries are the emulated ones."""
    return (_libraries / "libemulated_gpu_kernels.so").exists()


def is_started() -> bool:
    """Whether this process has them, by `start`."""
    return _driver is not None


def start() -> None:
    """Puts the stand-in kernels in the place of torch's own, once for all devices and threads."""
    global _driver, _kernels  # noqa: PLW0603 (one machine for one process)
    if _driver is not None:
        return
    torch.sqrt(torch.ones(1))  # the first call into MKL's vector mathematics has a race; kernels run in several threads
    torch.cuda.init()
    _driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    for told in (_driver.emulated_gpu_take_violations, _driver.emulated_gpu_stop_counting):
        told.restype = ctypes.c_char_p
    _driver.emulated_gpu_configure.argtypes = [ctypes.c_double] * 4
    _driver.emulated_gpu_configure_compute.argtypes = [ctypes.c_double] * 3
    _driver.emulated_gpu_take_late_seconds.restype = ctypes.c_double
    _driver.emulated_gpu_configure_peers.argtypes = [ctypes.c_int, ctypes.c_double]
    _driver.emulated_gpu_configure_queues.argtypes = [ctypes.c_int, ctypes.c_size_t]
    _driver.emulated_gpu_set_capacity.argtypes = [ctypes.c_int, ctypes.c_size_t]
    _driver.emulated_gpu_plan_fault.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
    _kernels = ctypes.CDLL(str(_libraries / "libemulated_gpu_kernels.so"))
    _kernels.emulated_gpu_install_kernels()
    torch.backends.cudnn.enabled = False
    for enable in ("flash", "mem_efficient", "cudnn"):  # attention is torch's own mathematics
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)


def _call() -> ctypes.CDLL:
    if _driver is None:
        raise RuntimeError("the emulated GPU was not started")
    return _driver


def configure(
    *, out_rate: float = 0, in_rate: float = 0, latency_seconds: float = 0, jitter_seconds: float = 0
) -> None:
    """The link's bytes per second each way, 0 for as fast as a core copies; what is queued runs late by the jitter."""
    _call().emulated_gpu_configure(out_rate, in_rate, latency_seconds, jitter_seconds)


def configure_compute(*, flop_rate: float = 0, memory_rate: float = 0, latency_seconds: float = 0) -> None:
    """What kernels take at least: their operations, or bytes of arguments and results, per second; and each of them.

    A rate of 0 is as fast as a core. Times are the set device's while cores are faster: see `take_late_seconds`.
    """
    _call().emulated_gpu_configure_compute(flop_rate, memory_rate, latency_seconds)


def configure_peers(*, have_access: bool = True, rate: float = 0) -> None:
    """Whether devices may have peer access from now on, and the bytes per second of copies between those that have.

    A rate of 0 is as fast as a core; copies without peer access go out to the host and in again.
    """
    _call().emulated_gpu_configure_peers(have_access, rate)


def take_late_seconds() -> float:
    """By how much kernels took longer than they were set to since the last call: times of the cores, not the device."""
    return float(_call().emulated_gpu_take_late_seconds())


def configure_queues(*, is_one: bool = False, max_queued: int = 0) -> None:
    """What streams share of the hardware.

    Args:
        is_one: all that is queued waits for what was queued before, on whatever stream.
        max_queued: operations that a stream holds; who queues more is held up, and all who call CUDA meanwhile. 0: any
            number.
    """
    _call().emulated_gpu_configure_queues(is_one, max_queued)


def configure_kernels(
    *, convolution_workspaces: bool = True, sums_in_any_order: bool = False, kernels_by_thread: bool = False
) -> None:
    """What NVIDIA's libraries do beside their arithmetic.

    Args:
        convolution_workspaces: convolutions take as much memory as their input while they run.
        sums_in_any_order: what a GPU adds up atomically is rounded otherwise in each call.
        kernels_by_thread: convolutions round otherwise in all threads but the first that called one.
    """
    if _kernels is None:
        raise RuntimeError("the emulated GPU was not started")
    _kernels.emulated_gpu_configure_libraries(convolution_workspaces, sums_in_any_order, kernels_by_thread)


def capacity_bytes(device: int = 0) -> int:
    """How much memory ``device`` has."""
    return torch.cuda.mem_get_info(device)[1]


def set_capacity(nbytes: int, device: int = 0) -> None:
    """From now on ``device`` has so much memory; what is allocated stays."""
    _call().emulated_gpu_set_capacity(device, nbytes)


def plan_fault(symbol: str, nth: int, code: int) -> None:
    """The nth call of a CUDA function from now fails with a code, once."""
    _call().emulated_gpu_plan_fault(symbol.encode(), nth, code)


def ignore_waits_of_the_driver(is_on: bool) -> None:
    """Whether cuStreamWaitEvent, which lmswap's engine calls and torch does not, does nothing."""
    _call().emulated_gpu_ignore_waits_of_the_driver(is_on)


@contextmanager
def held_stream() -> Iterator[Callable[[], None]]:
    """The current stream waits until what this yields is called; at the latest until the block ends."""
    word = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
    stream, address = torch.cuda.current_stream().cuda_stream, word.data_ptr()
    arguments = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(1), ctypes.c_uint(0)
    assert _call().cuStreamWaitValue64_v2(*arguments) == 0

    def let_go() -> None:
        word[0] = 1

    try:
        yield let_go
    finally:
        let_go()
        torch.cuda.synchronize()


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each CUDA function was called, by its symbol; known when the block has ended."""
    calls: Counter[str] = Counter()
    _call().emulated_gpu_start_counting()
    try:
        yield calls
    finally:
        lines = _call().emulated_gpu_stop_counting().decode().splitlines()
        calls.update({symbol: int(number) for symbol, number in map(str.split, lines)})


def mend() -> None:
    """What broke the context is forgotten, as in a new process; so are planned faults."""
    _call().emulated_gpu_mend()


def take_violations() -> list[str]:
    """A sentence for everything that was wrong since the last call, though it may have gone well."""
    return _call().emulated_gpu_take_violations().decode().splitlines()
