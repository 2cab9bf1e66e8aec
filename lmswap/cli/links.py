"""`lmswap links`: measures the links between this device and its tiers, and lists the links they can emulate."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lmswap.errors import LmswapError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.emulation import PRESETS, EmulatedLink
from lmswap.ir.machine import Link
from lmswap.reporting.text import figure_table, print_result, render_text

if TYPE_CHECKING:
    from lmswap.cli import Commands
    from lmswap.hardware.link import HostLink
    from lmswap.hardware.link_peak import PeakRate

_SCHEMA = "lmswap.links/2"


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "links",
        help="measure the links to the tiers; say which others they can emulate",
        epilog="example: lmswap links --json",
    )
    parser.add_argument("--disk-directory", metavar="DIR", help="where the disk tier would put its file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the links of the default device and print them; return 2 if no tier is available."""
    from lmswap.hardware.device import default_device
    from lmswap.hardware.link_peak import peak_rates
    from lmswap.hardware.survey import survey

    device, found = default_device(), survey(options.disk_directory, with_device_tier=True)
    tiers = {tier: machine.tier(tier).link for tier, machine in found.machines.items()}
    failures = {f"{tier} tier": why for tier, why in found.failures.items()}
    peaks = None
    try:
        peaks = peak_rates(device) if device.type == "cuda" else None
    except LmswapError as error:
        failures["host link"] = str(error)
    if options.json:
        data = {
            "schema": _SCHEMA,
            "device": str(found.device),
            "host_link": asdict(found.link),
            "peer": found.peer,
            "peak": dict(zip(("out", "in"), map(asdict, peaks), strict=True)) if peaks else None,
            "tiers": {tier: asdict(measured) for tier, measured in tiers.items()},
            "failures": failures,
            "presets": {
                preset: {**asdict(emulated), "tier": emulating_tier(emulated, tiers)}
                for preset, emulated in PRESETS.items()
            },
        }
        print_result(json.dumps(data, indent=1))
    else:
        print_result(links_text(str(found.device), found.link, peaks, tiers, failures, peer=found.peer))
    return 0 if tiers else 2


def emulating_tier(wanted: EmulatedLink, found: dict[str, Link]) -> str | None:
    """Return the first of the tiers ``found`` whose link can be slowed down to ``wanted``; None if none can."""
    for tier, link in found.items():
        try:
            wanted.over(link)
        except LmswapError:
            continue
        return tier
    return None


def links_text(
    device: str,
    host_link: HostLink,
    peaks: tuple[PeakRate, PeakRate] | None,
    tiers: dict[str, Link],
    failures: dict[str, str],
    *,
    peer: str | None = None,
) -> str:
    """Return what `lmswap links` prints: the host link's peak, the rates of the engine's copies, links to emulate."""
    parts: list[RenderableType] = [
        Text(f"lmswap links: {device}", style="bold"),
        Text(),
        Text(f"host link: {host_link.description}"),
    ]
    if peer:
        parts.append(Text(f"peer tier: {peer}"))
    if peaks:
        parts += [Text(), _peaks_table(peaks, host_link.bytes_per_second)]
    if tiers:
        parts += copies_tables(tiers)
    parts += [Text(f"{what}: NOT AVAILABLE: {why}") for what, why in failures.items()]
    if tiers:
        parts += [Text(), _presets_table(tiers), Text(), Text("What lmswap.enable(model, link=...) can emulate here:")]
        parts += [Text(_slower(tier, link)) for tier, link in tiers.items()]
        parts += [Text("- Only the ratio of copying to computing changes: latencies and compute stay this machine's.")]
    return render_text(*parts)


def _peaks_table(peaks: tuple[PeakRate, PeakRate], paper_bytes_per_second: float) -> Table:
    """Rates of large plain copies, measured as by nvbandwidth."""
    table = figure_table(
        "as nvbandwidth\nmeasures, GB/s", "alone", "on paper", "share", "both at once", "beside compute"
    )
    table.add_column("compute keeps", justify="right")
    for label, peak in zip(("out to the host", "in from the host"), peaks, strict=True):
        paper = (
            (_gigabytes(paper_bytes_per_second), _percent(peak.bytes_per_second / paper_bytes_per_second))
            if paper_bytes_per_second
            else ("unknown", "–")
        )
        rates = (_gigabytes(peak.both_bytes_per_second), _gigabytes(peak.busy_bytes_per_second))
        table.add_row(label, _gigabytes(peak.bytes_per_second), *paper, *rates, _percent(peak.compute_factor))
    return table


def copies_tables(tiers: dict[str, Link]) -> list[RenderableType]:
    """Rates of the engine's own copies, and what remains of them where they overlap, each below its heading."""
    rates, shares = (
        Text(heading, style="bold")
        for heading in (
            "Copies of lmswap, by size, GB/s (–: larger than was measured)",
            "Speed that is left where copies overlap",
        )
    )
    return [Text(), rates, _rates_table(tiers), Text(), shares, _shares_table(tiers)]


def _rates_table(tiers: dict[str, Link]) -> Table:
    """Rates at all sizes measured for any tier."""
    sizes = sorted({nbytes for link in tiers.values() for nbytes, _ in link.out_rate.points})
    names = [format_bytes(nbytes).replace(".00", "") for nbytes in sizes]
    table = figure_table("", *names)
    for tier, link in tiers.items():
        for label, rate in (("out to", link.out_rate), ("in from", link.in_rate)):
            most = rate.points[-1][0]
            speeds = [_gigabytes(nbytes / rate.seconds(nbytes)) if nbytes <= most else "–" for nbytes in sizes]
            table.add_row(f"{label} the {tier} tier", *speeds)
    return table


def _shares_table(tiers: dict[str, Link]) -> Table:
    """Shares of their speed that copies both ways, and copies and compute, keep when they overlap."""
    table = figure_table("", "copies, both ways", "copies, with compute", "compute, with copies")
    for tier, link in tiers.items():
        factors = (link.both_factor, link.busy_factor, link.compute_factor)
        table.add_row(f"{tier} tier", *map(_percent, factors))
    return table


def _presets_table(found: dict[str, Link]) -> Table:
    table = figure_table("known links, GB/s", "out", "in")
    table.add_column("can be emulated here by")
    for preset, wanted in PRESETS.items():
        tier = emulating_tier(wanted, found)
        how = f'link="{preset}", tier="{tier}"' if tier else "– (faster than every tier here)"
        rates = (_gigabytes(rate) for rate in (wanted.out_bytes_per_second, wanted.in_bytes_per_second))
        table.add_row(preset, *rates, how)
    return table


def _slower(tier: str, link: Link) -> str:
    out, into = (rate.bytes_per_second for rate in (link.out_rate, link.in_rate))
    half = _gigabytes(min(out, into) / 2)
    return (
        f'- tier="{tier}": up to {_gigabytes(out)} GB/s out and {_gigabytes(into)} GB/s in, such as link="{half}GB/s".'
    )


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
