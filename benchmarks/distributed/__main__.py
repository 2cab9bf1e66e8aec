"""Runs the multi-GPU rows of the case studies here: ``python -m benchmarks.distributed RECIPE``.

It starts torchrun for each number of ranks, plainly and under a budget, prints a table beside the published one, and
writes both table and figures. ``--from FILES`` only makes one table of stored results, measured or predicted. The
recipe ``predict`` trains nothing: it predicts the step of several ranks from a captured program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.distributed import allreduce, efficiency, resnet50, unet3d
from benchmarks.distributed.conductor import compare_in_turns
from benchmarks.distributed.launch import Launcher, RanksFailed, compare, scale
from benchmarks.distributed.prediction import command
from benchmarks.distributed.results import Results, join
from benchmarks.distributed.tables import write_page
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.commands.arguments import positive
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from lmswap.errors import LmswapError

OUTPUT = Path("distributed-output")
REPORTED = ("unet3d", "resnet50")  # the model of ranks was made while "gpt" was looked at


@dataclass(frozen=True)
class Choice:
    """A recipe on the command line: its own arguments, and on how many ranks it runs where there is no GPU."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    ranks: tuple[int, ...]
    budget: str | None = "50%"  # None: it has none, or one of its own
    models: tuple[str, ...] = ()  # of which some are chosen


RECIPES = {
    "resnet50": Choice(
        "ResNet-50 on images: shards, warm-up, LARS, mixed precision", resnet50.add_arguments, (1, 2), "85%"
    ),
    "allreduce": Choice("sums over ranks: flat, by nodes, fused", allreduce.add_arguments, (4,), budget=None),
    "unet3d": Choice("Table 7: the 3D U-Net with swapping on 1, 2, 4 ... ranks", unet3d.add_arguments, (1, 2), "60%"),
    "efficiency": Choice(
        "what ranks cost each other, measured and predicted from its parts",
        efficiency.add_arguments,
        (1, 2, 4),
        budget=None,
        models=efficiency.NAMES,
    ),
    "scale": Choice("ResNet-50: a larger batch on one rank, or more ranks", resnet50.add_arguments, (2,), "115%"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if all ranks finished, 1 if some failed, 2 for bad input, 130 for Ctrl-C."""
    arguments = make_parser().parse_args(argv)
    if arguments.recipe == "predict":
        return run_to_end("distributed", lambda: command.run(arguments))
    launching = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    launching.add_argument("recipe")
    _add_launching(launching, RECIPES[arguments.recipe])
    _, options = launching.parse_known_args(argv)  # what is left is the recipe's own
    return run_to_end("distributed", lambda: _run(arguments, options))


def _run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    found: list[Results] = []
    page, status = "", 0
    try:
        for part in _parts(arguments, options):
            found.append(part)
            page = _write(join(found), arguments.output)  # each time: what fails later loses nothing
    except (DataError, LmswapError) as error:
        sys.stderr.write(f"error: {error}\n")
        status = 1 if isinstance(error, RanksFailed) else 2
    sys.stdout.write(page)
    return status


def _parts(arguments: argparse.Namespace, options: Sequence[str]) -> Iterable[Results]:
    if arguments.rendered is not None:
        return map(Results.read, arguments.rendered)
    launcher = Launcher(max(arguments.ranks), arguments.restarts)
    if arguments.recipe == "efficiency":
        return compare_in_turns(launcher, arguments.models, arguments.ranks, options)
    if arguments.recipe == "scale":
        return scale(launcher, max(arguments.ranks), arguments.budget, arguments.batch, options)
    return compare(launcher, arguments.recipe, arguments.ranks, arguments.budget, options)


def _write(results: Results, folder: Path) -> str:
    results.write(folder / f"{results.recipe}.json")
    page = write_page(results)
    write_text(folder / f"{results.recipe}.md", page)
    return page


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    recipes = parser.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    for name, choice in RECIPES.items():
        its = recipes.add_parser(name, help=choice.summary, description=choice.summary, allow_abbrev=False)
        _add_launching(its, choice)
        choice.add_arguments(its)
    summary = "no training: the cost of 1, 2, 4 ... ranks, predicted for a captured program"
    command.add_arguments(recipes.add_parser("predict", help=summary, description=summary))
    return parser


def _add_launching(parser: argparse.ArgumentParser, choice: Choice) -> None:
    ranks = _ranks_of_gpus(torch.cuda.device_count()) or choice.ranks
    parser.add_argument("--ranks", type=positive, nargs="+", default=ranks, metavar="N", help=f"{ranks}")
    parser.add_argument(
        "--restarts", type=positive, default=0, metavar="N", help="of the ranks after one failed (%(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="DIR", help="for table and figures (%(default)s)"
    )
    parser.add_argument(
        "--from", dest="rendered", type=Path, nargs="+", metavar="FILE", help="run nothing: their table"
    )
    if choice.models:
        parser.add_argument("--models", choices=choice.models, nargs="+", default=REPORTED, help="%(default)s")
    if choice.budget is None:
        parser.set_defaults(budget=None)
    else:
        parser.add_argument(
            "--budget",
            default=choice.budget,
            help='of a rank: bytes, or a share of the plain peak, "50%%" (%(default)s)',
        )


def _ranks_of_gpus(num_gpus: int) -> tuple[int, ...]:
    """Powers of two up to ``num_gpus``, and ``num_gpus``."""
    powers = [2**power for power in range(num_gpus.bit_length()) if 2**power < num_gpus]
    return (*powers, num_gpus) if num_gpus else ()


if __name__ == "__main__":
    sys.exit(main())
