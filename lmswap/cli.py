"""The command `lmswap`: look at this machine, plan a captured program, run the benchmark.

Each command prints its result on standard output; an error of lmswap is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import lmswap
from lmswap.errors import LmswapError, OptionError
from lmswap.ir.bytesize import format_bytes, parse_bytes
from lmswap.ir.machine import Machine, Tier
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.reporting import make_explanation
from lmswap.reporting.text import format_excess, format_seconds, render_text

if TYPE_CHECKING:
    from lmswap.analyze.memory import StepMemory
    from lmswap.hardware.survey import Survey

_SHOWN_SIZES = (2**20, 2**24, 2**26)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 2 refused or failed with a sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # The benchmark has a parser of its own: what follows its name is not ours to read.
    benchmark = arguments[:2] if arguments[:1] == ["bench"] else []
    options = parser.parse_args(benchmark or arguments)
    try:
        if benchmark:
            return _bench(options.benchmark, arguments[2:])
        return int(options.run(options))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except LmswapError as error:
        _print(f"lmswap: {' '.join(str(error).split())}", sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmswap", description="Trains PyTorch models under a memory budget by swapping tensors."
    )
    parser.add_argument("--version", action="version", version=f"lmswap {lmswap.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what this machine has, how fast it is, and what lmswap will do")
    doctor.add_argument("--disk-directory", metavar="DIR", help="where the disk tier would put its file")
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser("plan", help="plan a program file under a budget, without running it")
    plan.add_argument("program", metavar="PROGRAM.json[.gz]", help="written by lmswap.program(model).to_json()")
    plan.add_argument(
        "--budget",
        required=True,
        help='bytes that the step may allocate: "6GiB", "800 MB"; or "40%%" of what it allocates unplanned',
    )
    plan.add_argument("--machine", metavar="FILE", help="a machine description; default: measure this machine")
    plan.add_argument("--policy", default="auto", help="default: auto, the fastest that fits")
    plan.add_argument("--tier", choices=("host", "disk"), help="default: the machine's first")
    plan.add_argument("--min-swap", metavar="BYTES", default="1MiB", help="smaller buffers stay; default: 1MiB")
    plan.add_argument("--json", action="store_true", help="print the figures as JSON")
    plan.set_defaults(run=_plan)

    bench = commands.add_parser("bench", help="train a benchmark network with and without swapping")
    bench.add_argument("benchmark", choices=("unet3d",), help="its own options follow: lmswap bench unet3d --help")
    return parser


def _bench(benchmark: str, arguments: list[str]) -> int:
    try:
        from benchmarks.unet3d import cli
    except ModuleNotFoundError as error:
        advice = "install lmswap with its extra: pip install 'lmswap[bench]'"
        raise OptionError(f"benchmark {benchmark} needs the package '{error.name}'; {advice}") from error
    return int(cli.main(arguments))


def _plan(options: argparse.Namespace) -> int:
    from lmswap.analyze.cost import roofline
    from lmswap.analyze.memory import StepMemory
    from lmswap.plan import make_plan

    min_swap_bytes = parse_bytes(options.min_swap, what="--min-swap")
    program = Program.from_json(_read(options.program))
    machine = Machine.from_json(_read(options.machine)) if options.machine else _this_machine(options.tier)
    costs = roofline(program, machine)
    limits: dict[str, Any] = {
        "budget_bytes": _budget_bytes(options.budget, StepMemory(program, costs)),
        "tier": options.tier or machine.tiers[0].name,
        "min_swap_bytes": min_swap_bytes,
    }
    started = time.perf_counter()
    plan = make_plan(options.policy, program, costs, machine, **limits)
    planning_seconds = time.perf_counter() - started
    figures = _plan_figures(program, plan, planning_seconds)
    _print(json.dumps(figures, indent=1) if options.json else _plan_text(program, plan, machine, figures))
    return 0


def _budget_bytes(text: str, memory: StepMemory) -> int:
    """Reads a budget: bytes, or a share of the peak that the step has when every buffer is kept."""
    if not text.strip().endswith("%"):
        return parse_bytes(text)
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise OptionError(f"budget {text!r} is not a share of the unplanned peak; write a number above 0, such as 40%")
    return max(1, int(share * memory.peak.nbytes))


def _plan_figures(program: Program, plan: Plan, planning_seconds: float) -> dict[str, Any]:
    decisions = make_explanation(program, plan).decisions
    nbytes = {kind: sum(row.nbytes for row in decisions if row.decision is kind) for kind in Decision}
    return {
        "schema": "lmswap.plan/2",
        "program": program.name,
        "policy": plan.policy,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.predicted_peak_bytes,
        "step_seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.certificate.seconds if plan.certificate else 0.0,
        "planning_seconds": planning_seconds,
        "kept_bytes": nbytes[Decision.KEEP],
        "swapped_bytes": nbytes[Decision.SWAP],
        "recomputed_bytes": nbytes[Decision.RECOMPUTE],
        "tier_bytes": plan.tier_bytes,
    }


def _plan_text(program: Program, plan: Plan, machine: Machine, figures: dict[str, Any]) -> str:
    table = Table.grid(padding=(0, 2))
    table.add_row("program", f"{program.name}: {len(program.ops)} ops, {len(program.buffers)} buffers")
    table.add_row("machine", machine.name)
    table.add_row("policy", f"{plan.policy}, planned in {format_seconds(figures['planning_seconds'])}")
    table.add_row("peak", f"{format_bytes(plan.predicted_peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)}")
    table.add_row("step", f"{format_seconds(plan.predicted_seconds)} (predicted from the machine's rates)")
    table.add_row("bound", f"{format_seconds(figures['lower_bound_seconds'])}: {format_excess(plan.excess)}")
    for decision in ("kept", "swapped", "recomputed"):
        table.add_row(decision, format_bytes(figures[f"{decision}_bytes"]))
    return render_text(table, Text(), make_explanation(program, plan))


def _this_machine(tier: str | None) -> Machine:
    from lmswap.hardware.device import default_device
    from lmswap.hardware.measure import describe_machine

    device = default_device()
    return describe_machine(device, tier or ("disk" if device.type == "cpu" else "host"))


def _read(path: str) -> str:
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise OptionError(f"cannot read '{path}': {error}") from error


def _doctor(options: argparse.Namespace) -> int:
    from lmswap.hardware.survey import survey

    found = survey(options.disk_directory)
    if options.json:
        _print(json.dumps({"schema": "lmswap.doctor/1", "lmswap": lmswap.__version__, **asdict(found)}, indent=1))
    else:
        _print(doctor_text(found))
    return 0 if found.machines else 2


def doctor_text(found: Survey) -> str:
    """What `lmswap doctor` prints: facts, measured rates, and what follows from them."""
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
    for name, failure in found.failures.items():
        facts.add_row(f"{name} tier", f"NOT AVAILABLE: {failure}")
    parts: list[RenderableType] = [Text("lmswap doctor", style="bold"), Text(), facts]
    if found.machines:
        parts += [Text(), _rates_table(found), Text(), Text("What lmswap will do here", style="bold")]
    parts += [Text(f"- {sentence}") for sentence in _consequences(found)]
    return render_text(*parts)


def _link_text(found: Survey) -> str:
    if not found.link.bytes_per_second:
        return found.link.description
    return f"{found.link.description}, {found.link.bytes_per_second / 1e9:.1f} GB/s each way on paper"


def _tier_text(found: Survey, tier: Tier) -> str:
    if tier.name == "host":
        return f"up to {format_bytes(tier.capacity_bytes)} of pinned memory"
    if found.directory is None:
        return ""
    where = f"'{found.directory.path}' on {found.directory.filesystem} ({found.directory.source})"
    return f"up to {format_bytes(tier.capacity_bytes)} in {where}"


def _rates_table(found: Survey) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("measured, GB/s")
    for nbytes in _SHOWN_SIZES:
        table.add_column(format_bytes(nbytes).replace(".00", ""), justify="right")
    table.add_column(f"{format_bytes(_SHOWN_SIZES[1]).replace('.00', '')}, both at once", justify="right")
    for name, machine in found.machines.items():
        link = machine.tier(name).link
        for label, rate in (("out to", link.out_rate), ("in from", link.in_rate)):
            speeds = [nbytes / rate.seconds(nbytes) / 1e9 for nbytes in _SHOWN_SIZES]
            shown = [*(f"{speed:.2f}" for speed in speeds), f"{speeds[1] * link.both_factor:.2f}"]
            table.add_row(f"{label} the {name} tier", *shown)
    return table


def _consequences(found: Survey) -> list[str]:
    if not found.machines:
        return ["Nothing: no tier can hold swapped tensors. lmswap.enable will refuse with the reason above."]
    name, machine = next(iter(found.machines.items()))
    tier = machine.tier(name)
    round_trip = tier.link.out_rate.seconds(2**30) + tier.link.in_rate.seconds(2**30)
    return [
        f"lmswap.enable(model, budget=...) swaps a model on {found.device.device} to the {name} tier by default.",
        f"1 GiB takes {format_seconds(tier.link.out_rate.seconds(2**30))} out and "
        f"{format_seconds(tier.link.in_rate.seconds(2**30))} back in; copies run beside compute.",
        f"They stay hidden while a step computes {machine.flops_per_second * round_trip / 2**30:,.0f} FLOP or more for "
        "each byte that it swaps; beyond that, compute waits.",
    ]


def _print(text: str, file: Any = None) -> None:
    print(text, file=file or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())
