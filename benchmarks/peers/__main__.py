"""Trains the same models in every way at the same budgets: `python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.cell import REFERENCE, Outcome
from benchmarks.peers.plot import plot
from benchmarks.peers.results import Results, describe_origin, read_results
from benchmarks.peers.run import Choice, run_model
from benchmarks.peers.tasks import MODELS, SIZES
from benchmarks.peers.ways import PEERS
from lmswap.bench.console import make_console
from lmswap.hardware.device import default_device
from lmswap.ir.bytesize import format_bytes
from lmswap.plan import POLICIES
from lmswap.reporting.text import format_seconds

RESULTS = Path(__file__).parents[1] / "results"
PERCENTS = (90, 80, 70, 60, 50, 40, 30, 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments choose; leaves a file for each model, and a picture of all that the folder holds."""
    options, console = _parser().parse_args(argv), make_console()
    device = default_device().type
    peers = [name for name in options.peers if PEERS[name].runs_on(device)]
    choice = Choice(options.budgets, options.policies, peers, options.size, device)
    command = shlex.join(["python", "-m", "benchmarks.peers", *(sys.argv[1:] if argv is None else argv)])
    folder = options.output or RESULTS / f"peers_{device}"
    folder.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        results = Results({**describe_origin(device, command), "note": options.note}, ())
        for outcome in run_model(choice, model):
            console.print(_line(outcome))
            results = replace(results, outcomes=(*results.outcomes, outcome))
            results.write(_file(folder, model))  # each time: a long run that is ended leaves what it has
    files = [_file(folder, model) for model in MODELS]
    plot([read_results(file) for file in files if file.exists()], folder / "peers.png")
    return 0


def _file(folder: Path, model: str) -> Path:
    return folder / f"{model}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    policies = [policy for policy in POLICIES if policy != REFERENCE]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, default=PERCENTS, metavar="PERCENT", help="of the free peak")
    parser.add_argument("--policies", nargs="*", choices=policies, default=policies, metavar="POLICY")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), metavar="PEER")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--output", type=Path, metavar="DIR", help="benchmarks/results/peers_cpu, or peers_cuda")
    parser.add_argument("--note", default="", help="what readers of the figures must know, for file and picture")
    return parser


def _line(outcome: Outcome) -> str:
    cell = outcome.cell
    at = "" if cell.percent is None else f"{cell.percent} %"
    head = f"{cell.model:<12} {cell.way:<20} {at:>5}  "
    if outcome.peak_bytes is not None and outcome.overhead is not None:
        bits = ""
        if outcome.other_from_step:
            more = f" and {len(outcome.others) - 1} more" if len(outcome.others) > 1 else ""
            bits = f"  other bits from step {outcome.other_from_step} on, in {outcome.others[0]}{more}"
        seconds = format_seconds(statistics.median(outcome.step_seconds))
        return f"{head}{format_bytes(outcome.peak_bytes):>11}  {seconds:>9}  {outcome.overhead:.2f} x{bits}"
    if outcome.needed_bytes is not None:
        return f"{head}needs {format_bytes(outcome.needed_bytes)}"
    return f"{head}failed: {outcome.detail}"


if __name__ == "__main__":
    sys.exit(main())
