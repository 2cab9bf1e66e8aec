"""`lmswap doctor`: reports what this machine has, how fast it is, and what lmswap will do on it."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import lmswap
from lmswap.cli.links import copies_tables
from lmswap.hardware.device import default_tier
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.machine import Tier
from lmswap.reporting.text import format_seconds, print_result, render_text

if TYPE_CHECKING:
    from lmswap.cli import Commands
    from lmswap.hardware.survey import Survey


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has, how fast it is, and what lmswap will do",
        epilog="example: lmswap doctor --disk-directory /scratch",
    )
    parser.add_argument("--disk-directory", metavar="DIR", help="where the disk tier would put its file")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Survey this machine and print the result; return 2 if no tier is available."""
    from lmswap.hardware.survey import survey

    found = survey(options.disk_directory)
    if options.json:
        print_result(json.dumps({"schema": "lmswap.doctor/1", "lmswap": lmswap.__version__, **asdict(found)}, indent=1))
    else:
        print_result(doctor_text(found))
    return 0 if found.machines else 2


def doctor_text(found: Survey) -> str:
    """Return what `lmswap doctor` prints: facts, measured rates and their consequences."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    device = found.device
    facts.add_row("device", str(device))
    if found.num_devices > 1:
        facts.add_row("", f"the first of {found.num_devices} visible GPUs; CUDA_VISIBLE_DEVICES chooses another")
    facts.add_row("memory", f"{format_bytes(device.available_bytes)} free of {format_bytes(device.total_bytes)}")
    facts.add_row("software", f"torch {device.torch_version}, {device.driver}, lmswap {lmswap.__version__}")
    facts.add_row("host link", _link_text(found))
    machine = next(iter(found.machines.values()), None)
    if machine is not None:
        rates = f"{machine.flops_per_second / 1e9:,.0f} GFLOP/s in float32 products, "
        rates += f"memory {machine.bytes_per_second / 1e9:,.1f} GB/s, {format_seconds(machine.op_seconds)} per op"
        facts.add_row("compute", rates)
    if found.device.device != "cpu":
        ram = f"{format_bytes(found.ram.available_bytes)} free of {format_bytes(found.ram.total_bytes)}"
        facts.add_row("host memory", ram)
    for name, other in found.machines.items():
        facts.add_row(f"{name} tier", _tier_text(found, other.tier(name)))
    if found.load > (count := os.cpu_count() or 1):
        busy = f"{found.load:.0f} on {count} cores: rates may be low; run lmswap doctor again when the machine is idle"
        facts.add_row("load", busy)
    for name, failure in found.failures.items():
        facts.add_row(f"{name} tier", f"NOT AVAILABLE: {failure}")
    parts: list[RenderableType] = [Text("This machine", style="bold"), facts]
    if found.machines:
        links = {name: machine.tier(name).link for name, machine in found.machines.items()}
        parts += copies_tables(links)
    parts += [Text(), Text("What lmswap will do here", style="bold")]
    parts += [Padding(Text(sentence), (0, 0, 0, 2)) for sentence in _consequences(found)]
    return render_text(*parts)


def _link_text(found: Survey) -> str:
    if not found.link.bytes_per_second:
        return found.link.description
    return f"{found.link.description}, {found.link.bytes_per_second / 1e9:.1f} GB/s each way on paper"


def _tier_text(found: Survey, tier: Tier) -> str:
    return _capacity_text(found, tier) + (
        f"; measured with {format_bytes(tier.sample_bytes)}, all that it has room for"
        if tier.sample_bytes is not None
        else ""
    )


def _capacity_text(found: Survey, tier: Tier) -> str:
    if tier.name == "host":
        return f"up to {format_bytes(tier.capacity_bytes)} of pinned memory"
    if tier.name == "compressed":
        return f"up to {format_bytes(tier.capacity_bytes)} of host memory, in which ReLU'd tensors take about half"
    if tier.name == "peer":
        return f"up to {format_bytes(tier.capacity_bytes)} of {found.peer}"
    if found.directory is None:
        return ""
    where = f"'{found.directory.path}' on {found.directory.filesystem} ({found.directory.source})"
    return f"up to {format_bytes(tier.capacity_bytes)} in {where}"


def _consequences(found: Survey) -> list[str]:
    if not found.machines:
        return ["Nothing: no tier can hold swapped tensors. lmswap.enable will refuse with the reason above."]
    name, machine = next(iter(found.machines.items()))
    tier = machine.tier(name)
    device = found.device.device
    default = default_tier(device)
    tier_given = "" if name == default else f', tier="{name}"'
    when = "by default" if name == default else f"only where tier=... names it: the {default} tier is not available"
    round_trip = tier.link.out_rate.seconds(2**30) + tier.link.in_rate.seconds(2**30)
    sentences = [
        f"lmswap.enable(model, budget=...{tier_given}) swaps a model on {device} to the {name} tier {when}.",
        f"1 GiB takes {format_seconds(tier.link.out_rate.seconds(2**30))} out and "
        f"{format_seconds(tier.link.in_rate.seconds(2**30))} back in; copies run beside compute.",
        f"They stay hidden while a step computes {machine.flops_per_second * round_trip / 2**30:,.0f} FLOP or more for "
        "each byte that it swaps; below that, compute waits.",
    ]
    if name == "disk" and found.directory is not None and found.directory.filesystem == "zfs":
        sentences.append(
            "ZFS reserves no room for files, so that a full disk shows in a step only; before version 2.3 it also "
            "keeps in memory what is swapped. Prefer another filesystem: --disk-directory."
        )
    return sentences
