"""The process of one rank, started by torchrun: joins, runs the recipe, measures; the first rank reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.console import make_console
from benchmarks.distributed.ranks import Ranks, joined
from benchmarks.distributed.results import Results
from benchmarks.distributed.tables import write_page
from benchmarks.unet3d.brats import DataError


def recipe_parser(
    recipe: str, about: str | None, add_arguments: Callable[[argparse.ArgumentParser], None], *, has_budget: bool = True
) -> argparse.ArgumentParser:
    """The command line of one of the processes: the recipe's own arguments, and where the first rank writes."""
    parser = argparse.ArgumentParser(prog=f"torchrun -m benchmarks.distributed.{recipe}", description=about)
    add_arguments(parser)
    if has_budget:
        parser.add_argument("--budget", help='bytes or "6GiB" of each rank for lmswap to keep to; default: plain torch')
    parser.add_argument("--record", type=Path, metavar="FILE", help="for the results, instead of a printed table")
    return parser


def measure(recipe: Callable[[Ranks], Results], record: Path | None) -> int:
    """Runs ``recipe`` as one rank; the first writes the results to ``record`` or prints them. Returns the exit code."""
    try:
        with joined() as ranks:
            results = recipe(ranks)
            if ranks.rank == 0:
                if record is not None:
                    results.write(record)
                else:
                    sys.stdout.write(write_page(results))
    except DataError as error:  # of a process that has not joined
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def say_on(ranks: Ranks) -> Callable[[str], None]:
    """A function that prints on the first rank only."""
    console = make_console()
    return (lambda text: console.print(text, highlight=False)) if ranks.rank == 0 else lambda _: None
