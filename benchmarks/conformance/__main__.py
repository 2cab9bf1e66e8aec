"""Trains what others wrote while tensors leave, beside plain torch: `python -m benchmarks.conformance`."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.conformance.check import PATHS
from benchmarks.conformance.results import Results, read_results
from benchmarks.conformance.run import BREADTH, PACKAGES, Outcome, cases, run_all
from benchmarks.conformance.table import render
from benchmarks.console import make_console
from benchmarks.peers.results import describe_origin
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from lmswap.reporting.text import format_seconds

# By the name of a package here: what it is called where it is installed from.
_DISTRIBUTIONS = (
    {name: name for name in PACKAGES} | dict.fromkeys(BREADTH, "torch") | {"smp": "segmentation-models-pytorch"}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments choose; leaves conformance_cpu.json and .md, and 1 if something of ours failed.

    2 for what cannot be used, 130 for Ctrl-C, with what was found until then.
    """
    options = _parser().parse_args(argv)
    return run_to_end("conformance", lambda: _run(options, make_console()))


def _run(options: argparse.Namespace, console: Console) -> int:
    packages = options.packages or [name for name in PACKAGES if _version(name) is not None]
    chosen = cases(packages, options.models, options.paths)
    if not chosen:
        console.print(f"none of {', '.join(packages)} has a model called {' or '.join(options.models)}")
        return 2
    path = options.output / "conformance_cpu.json"
    is_part = bool(options.packages or options.models) or options.paths != [*PATHS]
    known = read_results(path) if is_part and path.exists() else Results({}, ())
    origin = describe_origin("cpu", "python -m benchmarks.conformance")
    results = replace(known, origin={**origin, "packages": {_DISTRIBUTIONS[name]: _version(name) for name in PACKAGES}})
    failures = 0
    for outcome in run_all(chosen, at_once=options.at_once):
        console.print(_line(outcome), highlight=False)
        failures += outcome.finding.verdict == "failed"
        results = results.with_newer(replace(outcome, commit=origin["commit"]))
        results.write(path)  # each time: a long run that is ended leaves what it has
        write_text(path.with_suffix(".md"), render(results))
    return int(failures > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, metavar="NAME", help="default: all installed")
    parser.add_argument("--models", nargs="+", default=(), metavar="NAME", help="only these; stored ones stay")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=[*PATHS], metavar="NAME", help="default: both")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="cases beside each other")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results", metavar="DIR")
    return parser


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(_DISTRIBUTIONS[package])
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(outcome: Outcome) -> str:
    case, finding = outcome.case, outcome.finding
    found = finding.reason or finding.path
    seconds = format_seconds(outcome.seconds)
    return f"{case.package:<12} {case.model:<36} {case.path:<6} {finding.verdict:<8} {seconds:>8}  {found}"


if __name__ == "__main__":
    sys.exit(main())
