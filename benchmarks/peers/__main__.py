"""Trains the same models in every way at the same budgets: `python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.console import make_console
from benchmarks.peers.cell import REFERENCE
from benchmarks.peers.plot import plot
from benchmarks.peers.results import Results, describe, describe_origin, read_results
from benchmarks.peers.run import Choice, run_model
from benchmarks.peers.tasks import MODELS, SIZES
from benchmarks.peers.ways import PEERS
from benchmarks.unet3d.ending import run_to_end
from lmswap.hardware.device import default_device
from lmswap.planner import POLICIES

RESULTS = Path(__file__).parents[1] / "results"
PERCENTS = (90, 80, 70, 60, 50, 40, 30, 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments choose; leaves a file for each model, and a picture of all that the folder holds.

    1 if a way of lmswap's own failed, 2 for what cannot be used, 130 for Ctrl-C: with what was found until then.
    """
    options = _parser().parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.peers", *(sys.argv[1:] if argv is None else argv)])
    return run_to_end("peers", lambda: _run(options, command, make_console()))


def _run(options: argparse.Namespace, command: str, console: Console) -> int:
    device = default_device().type
    peers = [name for name in options.peers if PEERS[name].runs_on(device)]
    choice = Choice(options.budgets, options.policies, peers, options.size, device)
    folder = options.output or RESULTS / f"peers_{device}"
    has_failed = False
    for model in options.models:
        results = Results({**describe_origin(device, command), "note": options.note}, ())
        for outcome in run_model(choice, model):
            console.print(describe(outcome), highlight=False, soft_wrap=True)
            has_failed |= outcome.status == "failed" and outcome.cell.way not in PEERS  # which may break in any way
            results = replace(results, outcomes=(*results.outcomes, outcome))
            results.write(_file(folder, model))  # each time: a long run that is ended leaves what it has
    files = [_file(folder, model) for model in MODELS]
    plot([read_results(file) for file in files if file.exists()], folder / "peers.png")
    return int(has_failed)


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


if __name__ == "__main__":
    sys.exit(main())
