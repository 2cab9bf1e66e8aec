"""Emulated links: a rate each way that copies are paced to, given in GB/s or by the name of a known link."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from lmswap.errors import OptionError
from lmswap.files import is_path
from lmswap.ir.bytesize import MAX_BYTES, parse_bytes
from lmswap.ir.machine import Link, Rate


@dataclass(frozen=True)
class EmulatedLink:
    """A link that the copy lanes are paced to, in bytes per second out and in.

    Pacing changes the ratio of copying to computing and nothing else: compute, the device's memory and the latency of
    a copy stay those of the machine. Processes that name the same ``shared_file`` share one such link, as devices on
    one bus do: the file is created if it is missing, and all of them must give the same rates.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    shared_file: str | None = None

    def __post_init__(self) -> None:
        for rate in (self.out_bytes_per_second, self.in_bytes_per_second):
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1e6 <= rate < math.inf:
                raise OptionError(f"the rates of an emulated link are bytes per second, 1e6 or more, not {rate!r}")
            if rate > MAX_BYTES:
                raise OptionError(f"the rates of an emulated link are at most {MAX_BYTES:.3g} bytes per second")
        if self.shared_file is not None and not is_path(self.shared_file):
            raise OptionError(f"shared_file must be a path as a string of UTF-8, not {self.shared_file!r}")

    @property
    def unshared(self) -> EmulatedLink:
        """A link of the same rates that no other process shares."""
        return replace(self, shared_file=None)

    @staticmethod
    def parse(text: str) -> EmulatedLink:
        """Reads "11.7GB/s" (each way), "11.7GB/s out, 10.9GB/s in", or a name out of `PRESETS`.

        Raises:
            OptionError: it is none of these.
        """
        if text in PRESETS:
            return PRESETS[text]
        rates: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([^/]+)/s(?:\s+(out|in))?\s*", part)
            way = match[2] or "each way" if match else ""
            if match is None or way in rates:
                raise _unreadable(text)
            rates[way] = parse_bytes(match[1], what="link")
        if rates.keys() == {"each way"}:
            return EmulatedLink(rates["each way"], rates["each way"])
        if rates.keys() == {"out", "in"}:
            return EmulatedLink(rates["out"], rates["in"])
        raise _unreadable(text)

    def over(self, link: Link) -> Link:
        """``link`` under this pace: no copy is faster than either; the difference reduces contention.

        Raises:
            OptionError: the pace is above the measured rate of ``link``, so nothing would be slowed down.
        """
        room = math.inf
        ways = (("out", self.out_bytes_per_second, link.out_rate), ("in", self.in_bytes_per_second, link.in_rate))
        for way, wanted, measured in ways:
            if wanted > measured.bytes_per_second:
                raise OptionError(
                    f"a link of {wanted / 1e9:.3g} GB/s {way} cannot be emulated over one that was measured at "
                    f"{measured.bytes_per_second / 1e9:.3g} GB/s; give a lower rate, or on a GPU with spare memory use "
                    "tier='device'"
                )
            room = min(room, measured.bytes_per_second / wanted)
        return Link(
            out_rate=_paced(link.out_rate, self.out_bytes_per_second),
            in_rate=_paced(link.in_rate, self.in_bytes_per_second),
            both_factor=min(1.0, link.both_factor * room),
            busy_factor=min(1.0, link.busy_factor * room),
            compute_factor=1.0 - (1.0 - link.compute_factor) / room,
        )

    def __str__(self) -> str:
        shared = f", shared by '{self.shared_file}'" if self.shared_file else ""
        return f"{self.out_bytes_per_second / 1e9:.3g} GB/s out, {self.in_bytes_per_second / 1e9:.3g} GB/s in{shared}"


PRESETS = {
    # IBM's case study, table 4: x86, one GPU per bus (GPU→host, host→GPU).
    "pcie3": EmulatedLink(11.7e9, 10.9e9),
    # What nvbandwidth's README shows of a machine of that generation (31.5 GB/s on paper).
    "pcie4": EmulatedLink(26e9, 26e9),
    # 87 % of the 63 GB/s on paper, the best share that the others reach.
    "pcie5": EmulatedLink(55e9, 55e9),
    # IBM's case study, table 4: AC922 with 4 GPUs, three links of 25 GB/s each way.
    "nvlink2": EmulatedLink(60.4e9, 64.4e9),
    # GH200's data sheet: 900 GB/s, both ways added. Not a measurement.
    "c2c": EmulatedLink(450e9, 450e9),
}


def _paced(rate: Rate, bytes_per_second: float) -> Rate:
    return Rate(tuple((nbytes, max(seconds, nbytes / bytes_per_second)) for nbytes, seconds in rate.points))


def _unreadable(text: str) -> OptionError:
    names = ", ".join(PRESETS)
    return OptionError(
        f'link {text!r} is neither a rate, "11.7GB/s" or "11.7GB/s out, 10.9GB/s in", nor one of {names}'
    )
