"""How fast is this machine? Copies to a tier and back, matrix products and memory, measured once and remembered.

The rates are those of the engine that will move the bytes, one copy at a time and both directions at once, in seconds
of its own records. The file of a measurement is kept under the user's cache directory and is only as good as its key:
another driver, torch, file system or device measures anew.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmswap.errors import LmswapError, OptionError, TransferError
from lmswap.hardware.cache import CacheFile
from lmswap.hardware.device import describe_device
from lmswap.hardware.disk import describe_directory, swap_directory
from lmswap.hardware.link import HostLink, read_host_link
from lmswap.hardware.ram import read_ram
from lmswap.ir.machine import Link, Machine, Rate, Tier

if TYPE_CHECKING:
    import torch

    from lmswap.execute._C import Engine, TransferRecord

_log = logging.getLogger(__name__)

_SIZES = (2**18, 2**20, 2**22, 2**24, 2**26)
_REPEATS = 3
# Three runs in a row on two cores shared with other processes gave 49 and 107 GFLOP/s, minutes apart.
_COMPUTE_SECONDS = 1 / 3
_BOTH_BYTES = 2**24  # per copy while both directions run
_BOTH_COPIES = 6  # of the faster direction
# A slow disk ends the series early: beyond its last point a rate is linear.
_MAX_SECONDS_PER_SIZE = 0.5
_MAX_WAIT_SECONDS = 60.0  # for copies that take 1 s on a disk of 100 MB/s; longer is a failure, not a measurement
# Pinned pages cannot be taken back by the kernel; the rest is for data loaders, the page cache and other processes.
_PINNED_SHARE = 0.8
_DISK_SHARE = 0.9
_DEVICE_SHARE = 0.9


def describe_machine(
    device: torch.device, tier: str, disk_directory: str | None = None, *, refresh: bool = False
) -> Machine:
    """``device`` with its compute rates and one tier, with that one's measured link and present capacity.

    Tiers are "host", "disk" and, of a CUDA device, "device": its own spare memory.

    Measures where no earlier measurement is found, or always with ``refresh``; that takes one to three seconds.

    Raises:
        OptionError: an unknown tier.
        TierError: the tier cannot be had: no memory, no directory on a real disk.
        DriverError: the device's driver failed.
    """
    if tier not in ("host", "disk", "device"):
        raise OptionError(f"unknown tier {tier!r}; known are host, disk, device")
    directory = swap_directory(disk_directory) if tier == "disk" else ""
    cache = _cache_file(device, tier, directory)
    machine = None if refresh else _remembered(cache)
    if machine is None:
        _log.info("measuring %s and its %s tier", device, tier)
        machine = _measure_machine(device, tier, directory)
        cache.write(json.loads(machine.to_json()))
    measured = machine.tier(tier)
    return replace(machine, tiers=(replace(measured, capacity_bytes=_capacity_bytes(device, tier, directory)),))


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
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
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


def _capacity_bytes(device: torch.device, tier: str, directory: str) -> int:
    if tier == "disk":
        return int(_DISK_SHARE * describe_directory(directory).free_bytes)
    if tier == "device":
        return int(_DEVICE_SHARE * describe_device(device).available_bytes)
    return int(_PINNED_SHARE * read_ram().available_bytes)


def _measure_machine(device: torch.device, tier: str, directory: str) -> Machine:
    info = describe_device(device)
    return Machine(
        name=str(info),
        device_bytes=info.total_bytes,
        flops_per_second=_flops_per_second(device),
        bytes_per_second=_copied_bytes_per_second(device),
        op_seconds=_op_seconds(device),
        tiers=(Tier(tier, _capacity_bytes(device, tier, directory), _measure_link(device, tier, directory)),),
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


def _measure_link(device: torch.device, tier: str, directory: str) -> Link:
    from lmswap.execute import _C

    engine = _C.Engine(driver="cuda" if device.type == "cuda" else "host", device=device.index or 0)
    try:
        capacity_bytes = max(_SIZES[-1], 2 * _BOTH_COPIES * _BOTH_BYTES)
        if tier == "host":
            engine.open_host_tier(capacity_bytes)
        elif tier == "device":
            engine.open_device_tier(capacity_bytes)
        else:
            engine.open_disk_tier(directory, capacity_bytes)
        engine.reserve(tier, capacity_bytes)
        probe = LinkProbe(device, tier, engine)
        out_points, in_points = probe.alone()
        out_rate, in_rate = Rate(out_points), Rate(in_points)
        return Link(out_rate, in_rate, probe.both_factor(out_rate.seconds(_BOTH_BYTES), in_rate.seconds(_BOTH_BYTES)))
    finally:
        engine.close()


class LinkProbe:
    """Drives the engine's lanes with buffers of known sizes and reads its records."""

    def __init__(self, device: torch.device, tier: str, engine: Engine) -> None:
        self._tier, self._engine = tier, engine
        self._out_buffer, self._in_buffer = (_device_buffer(device, _SIZES[-1]) for _ in range(2))
        self._stream = _stream(device)

    def alone(self) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
        """Points (nbytes, seconds) of copies out and in, with nothing else under way."""
        points: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
        for nbytes in _SIZES:
            seconds: tuple[list[float], list[float]] = ([], [])
            started = time.perf_counter()
            while len(seconds[0]) < _REPEATS + 1:
                for record in self._round_trip(nbytes):
                    seconds[record.is_in].append(record.end_seconds - record.start_seconds)
            for direction in (0, 1):
                typical = statistics.median(seconds[direction][1:])  # the first one warms up
                # Noise can make a larger copy look faster than a smaller one; a rate ascends.
                slowest = points[direction][-1][1] if points[direction] else 1e-9
                points[direction].append((nbytes, max(typical, slowest)))
            if time.perf_counter() - started > _MAX_SECONDS_PER_SIZE:
                break
        return tuple(points[0]), tuple(points[1])

    def both_factor(self, out_seconds: float, in_seconds: float) -> float:
        """The share of its own rate that each direction keeps while the other runs.

        With W seconds of copies alone in the shorter direction and W + R in the longer, both started together end
        after W / factor + R.
        """
        fastest = min(out_seconds, in_seconds)
        num_out, num_in = (max(1, round(_BOTH_COPIES * fastest / seconds)) for seconds in (out_seconds, in_seconds))
        stored = [self._copy_out(number, number * _BOTH_BYTES, _BOTH_BYTES) for number in range(num_in)]
        for token in stored:
            self._engine.out_done(int(token), self._stream)
        self._engine.take_records()
        leaving = []
        arriving = []
        for number in range(max(num_out, num_in)):
            if number < num_in:
                pointer = self._in_buffer.data_ptr()
                arriving.append(self._engine.in_start(0, int(stored[number]), pointer, _BOTH_BYTES, self._stream))
            if number < num_out:
                leaving.append(self._copy_out(0, (num_in + number) * _BOTH_BYTES, _BOTH_BYTES))
        for transfer in arriving:
            self._engine.in_done(transfer, self._stream)
        for token in leaving:
            self._engine.out_done(int(token), self._stream)
        records = self._finished(num_out + num_in)
        makespan = max(r.end_seconds for r in records) - min(r.start_seconds for r in records)
        shorter, longer = sorted((num_out * out_seconds, num_in * in_seconds))
        return min(1.0, max(0.05, shorter / max(makespan - (longer - shorter), shorter)))

    def _round_trip(self, nbytes: int) -> list[TransferRecord]:
        token = self._copy_out(0, 0, nbytes)
        self._engine.out_done(int(token), self._stream)
        left = self._finished(1)
        transfer = self._engine.in_start(0, int(token), self._in_buffer.data_ptr(), nbytes, self._stream)
        self._engine.in_done(transfer, self._stream)
        return left + self._finished(1)

    def _copy_out(self, swap: int, offset: int, nbytes: int) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack

        capsule = self._engine.out_start(swap, self._tier, offset, self._out_buffer.data_ptr(), nbytes, self._stream)
        token: torch.Tensor = from_dlpack(capsule)
        return token

    def _finished(self, count: int) -> list[TransferRecord]:
        """The next ``count`` records; a wait on a CUDA stream returns before the copy has ended."""
        records: list[TransferRecord] = []
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while len(records) < count:
            if time.monotonic() > deadline:
                waited = f"{count - len(records)} of {count} copies did not end in {_MAX_WAIT_SECONDS:.0f} s"
                raise TransferError(f"the {self._tier} tier cannot be measured: {waited}")
            records += self._engine.take_records()
            if len(records) < count:
                time.sleep(1e-4)
        return records


def _device_buffer(device: torch.device, nbytes: int) -> torch.Tensor:
    """Touched bytes on ``device`` that begin on a page, as those of the heap and of the CUDA allocator do."""
    import torch

    page = 4096
    flat = torch.ones(nbytes + page, dtype=torch.uint8, device=device)
    return flat[-flat.data_ptr() % page :][:nbytes]


def _stream(device: torch.device) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _cache_file(device: torch.device, tier: str, directory: str) -> CacheFile:
    info = describe_device(device)
    key = {"device": str(info), "driver": info.driver, "torch": info.torch_version, "tier": tier}
    if directory:
        where = describe_directory(directory)
        key["disk"] = f"{where.filesystem} on {where.source}"
    return CacheFile.locate("machine", key)


def _remembered(cache: CacheFile) -> Machine | None:
    try:
        data = cache.read()
        return Machine.from_json(json.dumps(data)) if data is not None else None
    except (OSError, ValueError, LmswapError) as error:
        _log.warning("the remembered measurement %s cannot be used, measuring again: %s", cache.path, error)
        return None
