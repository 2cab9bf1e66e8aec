"""How fast is this machine? Matrix products, memory, and copies to a tier and back, measured once and remembered.

The file of a measurement is kept under the user's cache directory and is only as good as its key: another driver,
torch, file system or device measures anew.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmswap.errors import LmswapError, OptionError
from lmswap.hardware.cache import CacheFile
from lmswap.hardware.device import describe_device
from lmswap.hardware.disk import describe_directory, swap_directory
from lmswap.hardware.link import HostLink, find_gpu, read_host_link
from lmswap.hardware.peer import find_peer, free_bytes, peer_key
from lmswap.hardware.probe import measure_link
from lmswap.hardware.ram import read_ram
from lmswap.ir.machine import SCHEMA, Machine, Tier

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

# Three runs in a row on two cores shared with other processes gave 49 and 107 GFLOP/s, minutes apart.
_COMPUTE_SECONDS = 1 / 3
# Pinned pages cannot be taken back by the kernel; the rest is for data loaders, the page cache and other processes.
# What all processes of a machine that train together may pin.
_PINNED_SHARE = 0.8
_DISK_SHARE = 0.9
_DEVICE_SHARE = 0.9


def describe_machine(device: torch.device, tier: str, where: str | None = None, *, refresh: bool = False) -> Machine:
    """``device`` with its compute rates and one tier, with that one's measured link and present capacity.

    Tiers are "host", "disk" and, of a CUDA device, "device", its own spare memory, and "peer", that of another GPU.
    ``where`` is what was asked of `locate_tier`, or what it gave.

    Measures where no earlier measurement is found, or always with ``refresh``; that takes two to six seconds.

    Raises:
        OptionError: an unknown tier, or no other GPU.
        TierError: the tier cannot be had: no memory, no directory on a real disk.
        DriverError: the device's driver failed.
    """
    where = locate_tier(device, tier, where)
    cache = _cache_file(device, tier, where)
    machine = None if refresh else _remembered(cache)
    if machine is None:
        _log.info("measuring %s and its %s tier", device, tier)
        machine = _measure_machine(device, tier, where)
        cache.write(json.loads(machine.to_json()))
    measured = machine.tier(tier)
    return replace(machine, tiers=(replace(measured, capacity_bytes=_capacity_bytes(device, tier, where)),))


def locate_tier(device: torch.device, tier: str, where: str | None = None, needed_bytes: int | None = None) -> str:
    """Where the bytes of ``tier`` lie: a directory of the disk, another GPU ("cuda:1") of "peer"; else "".

    ``where`` is the one that was asked for, None for the best there is; ``needed_bytes`` of it must be free.

    Raises:
        OptionError: an unknown tier, or no other GPU.
        TierError: no directory on a real disk, or no GPU with memory.
    """
    if tier == "disk":
        return swap_directory(where)
    if tier == "peer":
        return find_peer(device, where, needed_bytes)
    if tier not in ("host", "device"):
        raise OptionError(f"unknown tier {tier!r}; known are host, disk, device, peer")
    return ""


def tiers_to_try(device: torch.device) -> tuple[str, ...]:
    """The tiers that ``device`` may have, preferred first: those that it swaps to when it is asked to."""
    import torch

    if device.type == "cpu":
        return ("disk",)
    return ("host", "disk", "peer") if torch.cuda.device_count() > 1 else ("host", "disk")


def num_local_processes() -> int:
    """How many processes of this machine train together, and share its memory: what torchrun tells each of them."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(found)) if found.isdecimal() else 1


def host_link(device: torch.device) -> HostLink:
    """What connects ``device`` to main memory, read while copies run, so that an idle PCIe link has woken up."""
    if device.type != "cuda":
        return HostLink("none", "none: the CPU computes in main memory itself")
    import pynvml  # type: ignore[import-untyped]
    import torch

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return HostLink("unknown", f"unknown: NVML does not start ({error})")
    try:
        handle = find_gpu(pynvml, str(torch.cuda.get_device_properties(device).uuid))
        source = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=device)
        for _ in range(32):  # 2 GiB: 30 ms and more on any link, longer than the questions take
            target.copy_(source, non_blocking=True)
        link = read_host_link(pynvml, handle)
        torch.cuda.synchronize(device)
    except pynvml.NVMLError as error:
        return HostLink("unknown", f"unknown: NVML does not know {device} ({error})")
    finally:
        pynvml.nvmlShutdown()
    return link


def _capacity_bytes(device: torch.device, tier: str, where: str) -> int:
    if tier == "disk":
        return int(_DISK_SHARE * describe_directory(where).free_bytes)
    if tier == "peer":
        return int(_DEVICE_SHARE * free_bytes(where))
    if tier == "device":
        return int(_DEVICE_SHARE * describe_device(device).available_bytes)
    return int(_PINNED_SHARE * read_ram().available_bytes / num_local_processes())


def _measure_machine(device: torch.device, tier: str, where: str) -> Machine:
    info = describe_device(device)
    return Machine(
        name=str(info),
        device_bytes=info.total_bytes,
        flops_per_second=_flops_per_second(device),
        bytes_per_second=_copied_bytes_per_second(device),
        op_seconds=_op_seconds(device),
        tiers=(Tier(tier, _capacity_bytes(device, tier, where), measure_link(device, tier, where)),),
    )


def _flops_per_second(device: torch.device) -> float:
    """Of a square float32 matrix product, under the precision that the user has set."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    left = torch.ones(size, size, device=device)
    out = torch.empty_like(left)
    return 2 * size**3 / _best_seconds(device, lambda: torch.mm(left, left, out=out))


def _copied_bytes_per_second(device: torch.device) -> float:
    """Bytes read plus bytes written, of a copy within the device's memory."""
    import torch

    source = torch.ones(2**28 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_seconds(device, lambda: target.copy_(source))


def _op_seconds(device: torch.device) -> float:
    """Of an op with next to nothing to do."""
    import torch

    small, count = torch.ones(16, device=device), 200

    def launch() -> None:
        for _ in range(count):
            torch.add(small, small)

    return _best_seconds(device, launch) / count


def _best_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """The best of the runs in a third of a second: what the device can do, not what its other users leave."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()  # warms up
    until = time.perf_counter() + _COMPUTE_SECONDS
    best = timed()
    while time.perf_counter() < until:
        best = min(best, timed())
    return best


def _cache_file(device: torch.device, tier: str, where: str) -> CacheFile:
    info = describe_device(device)
    key = {"device": str(info), "driver": info.driver, "torch": info.torch_version, "tier": tier, "schema": SCHEMA}
    if tier == "disk":
        directory = describe_directory(where)
        key["disk"] = f"{directory.filesystem} on {directory.source}"
    if tier == "peer":
        key["peer"] = peer_key(device, where)
    return CacheFile.locate("machine", key)


def _remembered(cache: CacheFile) -> Machine | None:
    try:
        data = cache.read()
        return Machine.from_json(json.dumps(data)) if data is not None else None
    except (OSError, ValueError, LmswapError) as error:
        _log.warning("the remembered measurement %s cannot be used, measuring again: %s", cache.path, error)
        return None
