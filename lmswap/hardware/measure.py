"""Measured machine descriptions: matrix products, memory, and copies to a tier and back; cached.

The cache file's key holds the driver, torch, file system and device: a change of any of them causes a new measurement.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmswap.errors import LmswapError, OptionError
from lmswap.hardware.cache import CacheFile
from lmswap.hardware.device import describe_device
from lmswap.hardware.disk import describe_directory, swap_directory
from lmswap.hardware.host_memory import read_host_memory
from lmswap.hardware.launch_overhead import measure_host
from lmswap.hardware.link import HostLink, find_gpu, read_host_link
from lmswap.hardware.local_ranks import LocalRanks, num_local_processes
from lmswap.hardware.microbench import smallest_long_enough
from lmswap.hardware.peer import find_peer, free_bytes, peer_key
from lmswap.hardware.probe import MEASURED_BYTES, measure_link
from lmswap.ir.machine import SCHEMA, Link, Machine, Rate, Tier, slowest, slowest_host
from lmswap.progress import reported

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

# Longer would not help: three runs in a row on two cores shared with other processes gave 49 and 107 GFLOP/s, minutes
# apart.
_COMPUTE_SECONDS = 0.1
_MIN_RUNS = 3
# Shares for all processes of a machine that train together. The kernel cannot reclaim pinned pages; the rest is for
# data loaders, the page cache and other processes.
_PINNED_SHARE = 0.8
_DISK_SHARE = 0.9
_DEVICE_SHARE = 0.9
# Of a machine that is not measured: one core, and a link of any tier.
_ASSUMED_FLOPS, _ASSUMED_BYTES, _ASSUMED_OP_SECONDS, _ASSUMED_LINK_BYTES = 5e10, 1e10, 2e-6, 1e9


def describe_machine(device: torch.device, tier: str, where: str | None = None, *, refresh: bool = False) -> Machine:
    """Describes ``device``: its compute rates and one tier, with its measured link and current capacity.

    Tiers are "host", "disk", "compressed" and, of a CUDA device, "device", its own spare memory, and "peer", that of
    another GPU. Measures if no earlier measurement is cached, or always with ``refresh``; takes one to four seconds.

    Args:
        device: where the model computes.
        tier: the name of the tier; with too little free space its sample is smaller, and not cached.
        where: argument or result of `locate_tier`.
        refresh: ignore the cache.

    Raises:
        OptionError: an unknown tier, or no other GPU.
        TierError: the tier is not available: no memory, no directory on a real disk.
        DriverError: the device's driver failed.
    """
    where = locate_tier(device, tier, where)
    cache = _cache_file(device, tier, where)
    machine = None if refresh else _cached_or_measured(cache)
    if machine is None:
        once = "once per number of threads" if device.type == "cpu" else "once per machine"
        with reported(f"measuring {device} and its {tier} tier ({once})"):
            machine = _measure_machine(device, tier, where)
        if machine.tier(tier).sample_bytes is None:
            cache.write(json.loads(machine.to_json()))
    measured = machine.tier(tier)
    return replace(machine, tiers=(replace(measured, capacity_bytes=tier_capacity(device, tier, where)),))


def assume_machine(device: torch.device, tier: str, where: str) -> Machine:
    """Describes ``device`` and one tier, at the location ``where``, without a measurement.

    From the cache if an earlier process has measured them, else with assumed rates.
    """
    info, room_bytes = describe_device(device), tier_capacity(device, tier, where)
    if (machine := _cached_or_measured(_cache_file(device, tier, where))) is not None:
        return replace(machine, tiers=(replace(machine.tier(tier), capacity_bytes=room_bytes),))
    rate = Rate.constant(_ASSUMED_LINK_BYTES)
    return Machine(
        name=str(info),
        device_bytes=info.total_bytes,
        flops_per_second=_ASSUMED_FLOPS,
        bytes_per_second=_ASSUMED_BYTES,
        op_seconds=_ASSUMED_OP_SECONDS,
        tiers=(Tier(tier, room_bytes, Link(rate, rate)),),
        is_measured=False,
    )


def locate_tier(device: torch.device, tier: str, where: str | None, needed_bytes: int | None = None) -> str:
    """The location of ``tier``: a directory for "disk", another GPU ("cuda:1") for "peer"; else "".

    ``where`` is the requested location, None for the best one; ``needed_bytes`` of it must be free.

    Raises:
        OptionError: an unknown tier, or no other GPU.
        TierError: no directory on a real disk, or no GPU with memory.
    """
    if tier == "disk":
        return swap_directory(where)
    if tier == "peer":
        return find_peer(device, where, needed_bytes)
    if tier not in ("host", "compressed", "device"):
        raise OptionError(f"unknown tier {tier!r}; known are host, disk, compressed, device, peer")
    return ""


def tiers_to_try(device: torch.device) -> tuple[str, ...]:
    """The tiers that ``device`` may have, preferred first."""
    import torch

    if device.type == "cpu":
        return ("disk", "compressed")
    tiers = ("host", "disk", "compressed")
    return (*tiers, "peer") if torch.cuda.device_count() > 1 else tiers


def describe_share(device: torch.device, tier: str, where: str | None, node: LocalRanks) -> Machine:
    """One rank's share of this machine under contention with the others: the same description on all of them.

    If nothing is cached, each rank is measured alone, in turn, and then the links of all simultaneously. The slowest
    rates and the least capacity count, so that equal steps with equal budgets get equal plans.

    Raises:
        RankMissing: a rank does not respond in time.
        OptionError, TierError, DriverError: as `describe_machine`, on any of them.
    """
    alone = node.gather("alone", lambda: describe_machine(device, tier, where).to_json(), in_turn=True)
    machines = [Machine.from_json(text) for text in alone]
    place = locate_tier(device, tier, where)
    cache = _cache_file(device, tier, place, num_ranks=node.count)
    known = _cached_or_measured(cache)
    is_known = all(node.gather("is known", lambda: "yes" if known else ""))

    def measure_at_once() -> str:
        if is_known and known is not None:
            return known.to_json()
        _log.info("measuring the %s tier of %s together with the other ranks of this machine", tier, device)
        link = measure_link(device, tier, place, machines[node.rank].tier(tier).capacity_bytes)
        return machines[node.rank].with_link(tier, link).to_json()

    shared = [Machine.from_json(text) for text in node.gather("at once", measure_at_once)]
    agreed = Machine(
        name=machines[0].name,
        device_bytes=min(machine.device_bytes for machine in machines),
        flops_per_second=min(machine.flops_per_second for machine in machines),
        bytes_per_second=min(machine.bytes_per_second for machine in machines),
        op_seconds=max(machine.op_seconds for machine in machines),
        tiers=(
            Tier(
                name=tier,
                capacity_bytes=min(machine.tier(tier).capacity_bytes for machine in machines),
                link=slowest([machine.tier(tier).link for machine in shared]),
                sample_bytes=min(filter(None, (machine.tier(tier).sample_bytes for machine in shared)), default=None),
            ),
        ),
        host=slowest_host([machine.host for machine in machines if machine.host is not None]),
    )
    if not is_known and agreed.tier(tier).sample_bytes is None:
        cache.write(json.loads(agreed.to_json()))
    return agreed


def host_link(device: torch.device) -> HostLink:
    """The link of ``device`` to main memory, read while copies run: an idle PCIe link reports a lower speed."""
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
        source = torch.empty(2**26, dtype=torch.uint8, device="cpu", pin_memory=True)
        target = torch.empty_like(source, device=device)
        for _ in range(32):  # 2 GiB: 30 ms and more on any link, longer than the queries take
            target.copy_(source, non_blocking=True)
        link = read_host_link(pynvml, handle)
        torch.cuda.synchronize(device)
    except pynvml.NVMLError as error:
        return HostLink("unknown", f"unknown: NVML does not know {device} ({error})")
    finally:
        pynvml.nvmlShutdown()
    return link


def tier_capacity(device: torch.device, tier: str, where: str) -> int:
    """The bytes that this process may take of ``tier``, which lies at ``where`` (see `locate_tier`), now."""
    if tier == "disk":
        return int(_DISK_SHARE * describe_directory(where).free_bytes / num_local_processes())
    if tier == "peer":
        return int(_DEVICE_SHARE * free_bytes(where))
    if tier == "device":
        return int(_DEVICE_SHARE * describe_device(device).available_bytes)
    return int(_PINNED_SHARE * read_host_memory().available_bytes / num_local_processes())


def _measure_machine(device: torch.device, tier: str, where: str) -> Machine:
    info = describe_device(device)
    room_bytes = tier_capacity(device, tier, where)
    link = measure_link(device, tier, where, room_bytes)
    return Machine(
        name=str(info),
        device_bytes=info.total_bytes,
        flops_per_second=_flops_per_second(device),
        bytes_per_second=_copied_bytes_per_second(device),
        op_seconds=_op_seconds(device),
        tiers=(Tier(tier, room_bytes, link, sample_bytes=room_bytes if room_bytes < MEASURED_BYTES else None),),
        host=measure_host(device, tier, where) if device.type == "cuda" else None,
    )


def _flops_per_second(device: torch.device) -> float:
    """Rate of a square float32 matrix product, at the precision that the user has set."""
    import torch

    def seconds_of(size: int) -> float:
        left = torch.ones(size, size, device=device)
        out = torch.empty_like(left)
        return _best_seconds(device, lambda: torch.mm(left, left, out=out))

    size, seconds = smallest_long_enough((2048, 4096, 8192) if device.type == "cuda" else (1024,), seconds_of)
    return 2 * size**3 / seconds


def _copied_bytes_per_second(device: torch.device) -> float:
    """Bytes read plus bytes written, of a copy within the device's memory."""
    import torch

    def seconds_of(nbytes: int) -> float:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return _best_seconds(device, lambda: target.copy_(source))

    # Larger than a GPU's caches.
    nbytes, seconds = smallest_long_enough((2**26, 2**28) if device.type == "cuda" else (2**26,), seconds_of)
    return 2 * nbytes / seconds


def _op_seconds(device: torch.device) -> float:
    """Seconds of an op on 16 elements."""
    import torch

    small, count = torch.ones(16, device=device), 200

    def launch() -> None:
        for _ in range(count):
            torch.add(small, small)

    return _best_seconds(device, launch) / count


def _best_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of the fastest run within `_COMPUTE_SECONDS`: the device's capability, without other users' load."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()  # warms up
    until = time.perf_counter() + _COMPUTE_SECONDS
    best = min(timed() for _ in range(_MIN_RUNS))
    while time.perf_counter() < until:
        best = min(best, timed())
    return best


def _cache_file(device: torch.device, tier: str, where: str, *, num_ranks: int = 1) -> CacheFile:
    info = describe_device(device)
    key: dict[str, Any] = {"device": str(info), "driver": info.driver, "torch": info.torch_version}
    key |= {"tier": tier, "schema": SCHEMA}
    if num_ranks > 1:
        key["ranks at once"] = num_ranks
    if tier == "disk":
        directory = describe_directory(where)
        key["disk"] = f"{directory.filesystem} on {directory.source}"
    if tier == "peer":
        key["peer"] = peer_key(device, where)
    return CacheFile.locate("machine", key)


def _cached_or_measured(cache: CacheFile) -> Machine | None:
    try:
        data = cache.read()
        return Machine.from_json(json.dumps(data)) if data is not None else None
    except (OSError, ValueError, LmswapError) as error:
        _log.warning("the cached measurement %s cannot be used, measuring again: %s", cache.path, error)
        return None
