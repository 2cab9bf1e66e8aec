"""The machine that a plan is made for: a device, its tiers, and the links to them. JSON schema `SCHEMA`."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

from lmswap.errors import OptionError
from lmswap.ir.bytesize import MAX_BYTES
from lmswap.ir.json_io import from_fields, read_record

SCHEMA = "lmswap.machine/4"

# Far beyond any machine; the planner's arithmetic stays finite within them.
_MAX_SECONDS = 1e15
_RATES = (1.0, 1e30)  # FLOPs or bytes per second
_MIN_FACTOR = 1e-9


@dataclass(frozen=True)
class Rate:
    """Seconds of a copy as a function of its size: measured points, interpolated in seconds, linear beyond the last.

    ``points`` are (nbytes, seconds), ascending in both; before the first, the first point's seconds hold (latency).
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise OptionError("a rate needs at least one measured point (nbytes, seconds)")
        for (small, fast), (large, slow) in zip(self.points, self.points[1:], strict=False):
            if large <= small or not slow >= fast:
                raise OptionError(f"rate points must ascend: ({small}, {fast}) is followed by ({large}, {slow})")
        (min_bytes, min_seconds), (max_bytes, max_seconds) = self.points[0], self.points[-1]
        if not (min_bytes > 0 and max_bytes <= MAX_BYTES and min_seconds >= 0 and 0 < max_seconds <= _MAX_SECONDS):
            raise OptionError(
                f"rate points must be positive, of at most {MAX_BYTES} bytes and {_MAX_SECONDS:g} s, got "
                f"{self.points[0]} … {self.points[-1]}"
            )

    @staticmethod
    def constant(bytes_per_second: float, latency_seconds: float = 0.0) -> Rate:
        """A link of one speed: seconds(n) = latency + n / bytes_per_second."""
        return Rate(((1, latency_seconds + 1 / bytes_per_second), (2**40, latency_seconds + 2**40 / bytes_per_second)))

    @property
    def bytes_per_second(self) -> float:
        """The speed of the largest copy that was measured."""
        nbytes, seconds = self.points[-1]
        return nbytes / seconds

    def times(self, factor: float) -> Rate:
        """This rate, faster by ``factor``."""
        return Rate(tuple((nbytes, seconds / factor) for nbytes, seconds in self.points))

    def seconds(self, nbytes: int) -> float:
        """Seconds that one copy of ``nbytes`` takes when nothing else uses the link; 0 bytes take 0."""
        if nbytes <= 0:
            return 0.0
        right = bisect.bisect_left(self.points, (nbytes,))  # before a point of the same size
        if right == 0:
            return self.points[0][1]
        if right == len(self.points):
            size, seconds = self.points[-1]
            return seconds * nbytes / size
        (size0, seconds0), (size1, seconds1) = self.points[right - 1], self.points[right]
        return seconds0 + (seconds1 - seconds0) * (nbytes - size0) / (size1 - size0)


@dataclass(frozen=True)
class Link:
    """The path between the device and a tier. Out is away from the device.

    ``both_factor`` is the share of its rate that each direction keeps while both run: 1.0 is full duplex,
    0.5 means that the two directions share one rate. ``busy_factor`` is the share that a copy keeps while the device
    computes, which takes bandwidth of the same memories; ``compute_factor`` is the share of its speed that compute
    keeps while copies run.
    """

    out_rate: Rate
    in_rate: Rate
    both_factor: float = 1.0
    busy_factor: float = 1.0
    compute_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("both_factor", "busy_factor", "compute_factor"):
            factor = getattr(self, name)
            if not _MIN_FACTOR <= factor <= 1:
                raise OptionError(f"{name} must be {_MIN_FACTOR:g} to 1, got {factor}")

    @property
    def both_rate(self) -> float:
        """Seconds of copies that both directions together do in a second: 2 is full duplex, 1 half duplex."""
        return max(1.0, 2 * self.both_factor)

    @cached_property
    def while_busy(self) -> Link:
        """This link at its rates while the device computes: plans are made and simulated for it."""
        out_rate, in_rate = self.out_rate.times(self.busy_factor), self.in_rate.times(self.busy_factor)
        return Link(out_rate, in_rate, self.both_factor, compute_factor=self.compute_factor)

    def times(self, factor: float) -> Link:
        """This link, faster by ``factor``."""
        return replace(self, out_rate=self.out_rate.times(factor), in_rate=self.in_rate.times(factor))


def slowest(links: Sequence[Link]) -> Link:
    """A link on which no copy is faster than on any of ``links``, at the sizes that were measured on all of them."""

    def rate(rates: Sequence[Rate]) -> Rate:
        sizes = sorted(set.intersection(*({size for size, _ in rate.points} for rate in rates)))
        return Rate(tuple((size, max(rate.seconds(size) for rate in rates)) for size in sizes))

    return Link(
        out_rate=rate([link.out_rate for link in links]),
        in_rate=rate([link.in_rate for link in links]),
        both_factor=min(link.both_factor for link in links),
        busy_factor=min(link.busy_factor for link in links),
        compute_factor=min(link.compute_factor for link in links),
    )


@dataclass(frozen=True)
class Tier:
    """Memory that can hold swapped buffers.

    "host" (pinned memory), "disk", "compressed" (host memory), "device" (its own spare memory) or "peer" (another
    GPU's memory). ``ratio`` is the bytes of buffers that it holds per byte of its capacity (compression).
    ``sample_bytes``: what its link was measured with, where less than the usual sample was free.
    """

    name: str
    capacity_bytes: int
    link: Link
    ratio: float = 1.0
    sample_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < math.inf:
            raise OptionError(f"tier '{self.name}' cannot hold {self.ratio} times what it takes")
        if not 0 <= self.capacity_bytes <= MAX_BYTES / self.ratio:
            raise OptionError(f"tier '{self.name}' cannot have {self.capacity_bytes} bytes")

    @property
    def held_bytes(self) -> int:
        """The bytes of buffers that it can hold at once."""
        return round(self.ratio * self.capacity_bytes)


@dataclass(frozen=True)
class Host:
    """The host's launch overhead: seconds to queue one op, and all calls of a copy one way."""

    op_seconds: float
    copy_seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.op_seconds <= _MAX_SECONDS and 0 <= self.copy_seconds <= _MAX_SECONDS):
            raise OptionError(
                f"a host's seconds must be 0 to {_MAX_SECONDS:g}, got {self.op_seconds} and {self.copy_seconds}"
            )

    def seconds(self, num_ops: int, num_copies: int) -> float:
        """Seconds to queue ``num_ops`` ops and ``num_copies`` copies."""
        return num_ops * self.op_seconds + num_copies * self.copy_seconds

    def times(self, factor: float) -> Host:
        """This host, faster by ``factor``."""
        return Host(self.op_seconds / factor, self.copy_seconds / factor)


def slowest_host(hosts: Sequence[Host]) -> Host | None:
    """A host that is no faster than any of ``hosts``; None if there are none."""
    return Host(max(h.op_seconds for h in hosts), max(h.copy_seconds for h in hosts)) if hosts else None


@dataclass(frozen=True)
class Machine:
    """A device and its tiers. ``flops_per_second`` and ``bytes_per_second`` are the roofline of its compute.

    ``host`` queues the work ahead of the device; None where the device is the host itself, or it was not measured.
    Without ``is_measured`` the rates are assumed: no plan that moves tensors may be made by them.
    """

    name: str
    device_bytes: int
    flops_per_second: float
    bytes_per_second: float
    op_seconds: float  # fixed cost of launching one op
    tiers: tuple[Tier, ...]
    host: Host | None = None
    is_measured: bool = True

    def __post_init__(self) -> None:
        least, most = _RATES
        if not (least <= self.flops_per_second <= most and least <= self.bytes_per_second <= most):
            raise OptionError(
                f"flops_per_second and bytes_per_second must be {least:g} to {most:g}, got {self.flops_per_second} and "
                f"{self.bytes_per_second}"
            )
        if not 0 <= self.device_bytes <= MAX_BYTES:
            raise OptionError(f"device_bytes must be 0 to {MAX_BYTES}, got {self.device_bytes}")
        if not 0 <= self.op_seconds <= _MAX_SECONDS:
            raise OptionError(f"op_seconds must be 0 to {_MAX_SECONDS:g}, got {self.op_seconds}")

    def tier(self, name: str) -> Tier:
        """The tier called ``name``.

        Raises:
            OptionError: the machine has none of that name.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise OptionError(f"machine '{self.name}' has no tier '{name}'; it has {[t.name for t in self.tiers]}")

    def with_link(self, name: str, link: Link) -> Machine:
        """This machine with another link to the tier called ``name``."""
        return replace(self, tiers=tuple(replace(t, link=link) if t.name == name else t for t in self.tiers))

    def with_links_at(self, share: float) -> Machine:
        """This machine with links of ``share`` of their rates."""
        return replace(self, tiers=tuple(replace(tier, link=tier.link.times(share)) for tier in self.tiers))

    def with_ratio(self, name: str, ratio: float) -> Machine:
        """This machine with another compression ratio of the tier called ``name``."""
        return replace(self, tiers=tuple(replace(t, ratio=ratio) if t.name == name else t for t in self.tiers))

    def to_json(self) -> str:
        """The machine description as JSON text; `from_json` reads it back equal."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Machine:
        """Reads what `to_json` or a person wrote.

        Raises:
            OptionError: not JSON, of another schema, or a field is missing or not a number.
        """
        return read_record(text, SCHEMA, partial(from_fields, Machine), "machine description")
