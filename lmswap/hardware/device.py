"""The device of a model and its driver software, described for messages and for cache keys."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmswap.hardware.host_memory import read_host_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceInfo:
    """A device by name. ``total_bytes`` is its memory; ``driver`` the CUDA driver's version, or the kernel's."""

    device: str
    name: str
    total_bytes: int
    available_bytes: int
    torch_version: str
    driver: str

    def __str__(self) -> str:
        return f"{self.device} ({self.name})"


def default_device() -> torch.device:
    """The first CUDA device that is visible, else the CPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def default_tier(device: str) -> str:
    """Where tensors of a model on ``device``, "cpu" or of CUDA, are swapped to by default."""
    return "disk" if device == "cpu" else "host"


def describe_device(device: torch.device) -> DeviceInfo:
    """Names ``device``, its memory and its software."""
    import torch

    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return DeviceInfo(str(device), name, total_bytes, free_bytes, torch.__version__, _cuda_driver())
    ram = read_host_memory()
    threads = torch.get_num_threads()
    name = f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"
    driver = f"{platform.system()} {platform.release()}"
    return DeviceInfo(str(device), name, ram.total_bytes, ram.available_bytes, torch.__version__, driver)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _cuda_driver() -> str:
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        try:
            return f"CUDA driver {pynvml.nvmlSystemGetDriverVersion()}"
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"CUDA driver of unknown version ({error})"
