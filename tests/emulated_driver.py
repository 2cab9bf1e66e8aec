"""Runs the engine's CUDA path without torch's CUDA build, on the driver interface of the emulated GPU alone.

Device memory is the emulated GPU's, at addresses that cannot be dereferenced; a test can query where its bytes are.
"""

import ctypes
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_SOURCES = Path(__file__).parents[1] / "tools" / "emulated_gpu"


@dataclass
class DeviceTensor:
    """A tensor in device memory, as far as an engine needs it."""

    address: int
    values: torch.Tensor  # of the CPU, over the same bytes

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def data_ptr(self) -> int:
        return self.address


class EmulatedDriver:
    """A library in the place of libcuda, strict about misuse; compiled where ``folder`` has none."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "libemulated_driver.so")
        faces = (_SOURCES / "faces" / f"{name}.cpp" for name in ("attributes", "control", "driver"))
        # As one: one by one they take 16 s instead of 5, of which most reads the same headers.
        whole = "\n".join(f'#include "{source}"' for source in (*_SOURCES.glob("device/*.cpp"), *faces))
        command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", "-o", self.path, "-x", "c++", "-", "-lpthread"]
        with (folder / "emulated_driver.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this run may be at it
            if not Path(self.path).exists():
                subprocess.run(command, input=whole, text=True, check=True)
        os.environ.setdefault("EMULATED_GPU_DEVICES", "2")  # one to compute, and its peer
        self._library = ctypes.CDLL(self.path)
        for reported in (self._library.emulated_gpu_take_violations, self._library.emulated_gpu_held):
            reported.restype = ctypes.c_char_p
        self._library.emulated_gpu_bytes_of.restype = ctypes.c_void_p
        self._library.emulated_gpu_bytes_of.argtypes = [ctypes.c_void_p]
        self._library.emulated_gpu_configure.argtypes = [ctypes.c_double] * 4

    def set_delay(self, max_seconds: float) -> None:
        """From now on everything queued runs late by a random time of at most so many seconds."""
        self._library.emulated_gpu_configure(0, 0, 0, max_seconds)

    def ignore_waits(self, is_on: bool) -> None:
        """Whether streams wait for no event: what an engine would do that forgot to ask for it."""
        self._library.emulated_gpu_ignore_waits_of_the_driver(is_on)

    def calm(self) -> None:
        """Undoes the two, and forgets what was wrong."""
        self.set_delay(0)
        self.ignore_waits(False)
        self.take_violations()

    def take_violations(self) -> list[str]:
        """A sentence for everything that was wrong since the last call."""
        return self._library.emulated_gpu_take_violations().decode().splitlines()

    def held(self) -> dict[str, int]:
        """What was made and not given back."""
        lines = self._library.emulated_gpu_held().decode().splitlines()
        return {what: int(number) for what, number in map(str.split, lines)}

    @contextmanager
    def on_device(self, *tensors: torch.Tensor) -> Iterator[list[DeviceTensor]]:
        """Copies of tensors, in device memory for as long as the block runs."""
        with self._context():
            copies = [self._allocate(tensor) for tensor in tensors]
        yield copies
        with self._context():
            for copy in copies:
                assert self._library.cuMemFree_v2(ctypes.c_void_p(copy.address)) == 0

    def _allocate(self, tensor: torch.Tensor) -> DeviceTensor:
        address = ctypes.c_void_p()
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(tensor.nbytes)) == 0
        assert address.value is not None
        place = (ctypes.c_char * tensor.nbytes).from_address(self._library.emulated_gpu_bytes_of(address))
        return DeviceTensor(address.value, torch.frombuffer(place, dtype=tensor.dtype).copy_(tensor))

    @contextmanager
    def _context(self) -> Iterator[None]:
        context = ctypes.c_void_p()
        calls = self._library
        assert calls.cuInit(0) == calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert calls.cuCtxPushCurrent_v2(context) == 0
        yield
        assert calls.cuCtxPopCurrent_v2(ctypes.byref(context)) == calls.cuDevicePrimaryCtxRelease_v2(0) == 0
