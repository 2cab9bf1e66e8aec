"""Arguments of a comparison within a budget: ways, limits, steps, and where results are written."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.needs import Needs
from benchmarks.weights.comparison import Choice
from benchmarks.weights.outcomes import PLAIN, Steps
from lmswap.errors import OptionError, TierError
from lmswap.hardware.disk import describe_directory, swap_directory
from lmswap.hardware.host_memory import read_host_memory
from lmswap.ir.bytesize import format_bytes, parse_bytes

RESULTS = Path(__file__).parents[1] / "results"
_PROCESS_BYTES = 2**29


def add_arguments(
    parser: argparse.ArgumentParser, *, tasks: Collection[str], ways: Collection[str], sizes: Collection[str]
) -> None:
    """Add those that all comparisons have."""
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=[*tasks], metavar="TASK", help=", ".join(tasks))
    parser.add_argument("--ways", nargs="+", choices=ways, metavar="WAY", help=f"of {', '.join(ways)} (all)")
    parser.add_argument("--size", choices=sizes, default="cpu", help="of the models (cpu)")
    parser.add_argument("--copy-share", type=float, default=0.55, help="of plain torch's step: copies (0.55)")
    parser.add_argument("--warm-up", type=int, default=5, metavar="STEPS", help="until plans are final (5)")
    parser.add_argument("--steady", type=int, default=3, metavar="STEPS", help="that follow each other (3)")
    parser.add_argument("--timed", type=int, default=5, metavar="STEPS", help="in turns (5)")
    parser.add_argument("--resume", action="store_true", help="skip tasks that the output has of the same code")
    parser.add_argument("--output", type=Path, help=f"benchmarks/results/{_name(parser)}_DEVICE.json; a page beside it")
    parser.add_argument("--note", default="", help="what readers of the figures must know")


def output_of(options: argparse.Namespace, parser: argparse.ArgumentParser, device: str) -> Path:
    """The file that results are written to.

    Raises:
        OptionError: its folder may not be written to.
    """
    output: Path = options.output or RESULTS / f"{_name(parser)}_{device}.json"
    if not os.access(output.parent, os.W_OK):
        raise OptionError(f"results cannot be written to {output}")
    return output


def choice_of(options: argparse.Namespace, ways: Mapping[str, Needs], device: str, budget: str | None) -> Choice:
    """The ways that run here, within ``budget``, or else the share.

    Raises:
        OptionError: what cannot be run.
    """
    for name, value in (("--share", options.share), ("--copy-share", options.copy_share)):
        if not (math.isfinite(value) and 0 < value < 1):
            raise OptionError(f"{name} is between 0 and 1, not {value}")
    if min(options.warm_up, options.timed) < 1 or options.steady < 0:
        raise OptionError("--warm-up and --timed are at least 1, --steady at least 0")
    refusals = {way: ways[way].refusal(device) for way in options.ways or ways}
    for way, refusal in refusals.items():
        if refusal is not None and options.ways:
            raise OptionError(f"{way} {refusal}")
    return Choice(
        [way for way, refusal in refusals.items() if refusal is None and way != PLAIN],
        options.size,
        device,
        options.share,
        parse_bytes(budget) if budget else None,
        options.copy_share if device == "cpu" else None,
        Steps(options.warm_up, options.steady, options.timed),
    )


def check_room(num_ways: int, nbytes: int, device: str) -> None:
    """Check that memory and disk hold what as many ways, each of ``nbytes``, have beside each other.

    Raises:
        OptionError: memory does not.
        TierError: the disk does not, or there is none to swap to.
    """
    num_models = num_ways + 2 if device == "cpu" else 2
    needed, available = num_models * (nbytes + _PROCESS_BYTES), read_host_memory().available_bytes
    if needed > available:
        raise OptionError(
            f"{num_models} models of {format_bytes(nbytes)} do not fit in the {format_bytes(available)} that are "
            "available; choose fewer --ways"
        )
    if device == "cpu":
        directory = swap_directory()
        if num_models * nbytes > describe_directory(directory).free_bytes:
            raise TierError(f"{directory} has no room for {num_models} models of {format_bytes(nbytes)}")


def _name(parser: argparse.ArgumentParser) -> str:
    return parser.prog.rpartition(".")[2]
