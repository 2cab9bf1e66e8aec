"""``lmswap bench unet3d``: the comparison of the case study at any sizes, budget and policy."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.console import ProgressView, print_study
from benchmarks.unet3d.network import MIN_SIZE, SIZE_MULTIPLE
from benchmarks.unet3d.study import Settings, compare
from benchmarks.unet3d.verdict import judge
from lmswap.errors import OptionError
from lmswap.options import Options


def main(argv: Sequence[str]) -> int:
    """Runs the command line; 0 if all runs finished in budget with equal bits, 1 if not, 2 for bad input."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    settings = read_settings(arguments, parser)
    console = Console()
    try:
        with ProgressView(console) as view:
            study = compare(settings, view.on_event, command=f"lmswap bench unet3d {shlex.join(argv)}")
    except DataError as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        return 2
    verdicts = judge(study)
    print_study(console, study, verdicts)
    if arguments.json is not None:
        study.write(arguments.json)
    return int(any(verdict.holds is False for verdict in verdicts))


def make_parser() -> argparse.ArgumentParser:
    """The options of ``lmswap bench unet3d``."""
    parser = argparse.ArgumentParser(
        prog="lmswap bench unet3d",
        description="Trains the 3D U-Net at several image sizes: plainly, and under a memory budget with swapping. "
        "Compares memory, time and the bits of losses and weights. Each run is a process of its own.",
    )
    parser.add_argument(
        "--sizes", type=_size, nargs="+", required=True, metavar="N", help="cube sides, multiples of 16"
    )
    parser.add_argument("--budget", help='bytes or "6GiB"; default: what the first size takes plainly')
    parser.add_argument("--policy", default="auto", help="how lmswap chooses what to swap (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a BraTS folder; default: made subjects")
    parser.add_argument("--steps", type=_positive, default=5, metavar="N", help="training steps a run (%(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 means autocast (%(default)s)")
    parser.add_argument(
        "--head", choices=("conv", "block"), default="conv", help="block: as the case study (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and dropout (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="for subjects, cubes and logs (%(default)s)",
    )
    return parser


def read_settings(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """Checks what argparse cannot; ends the program with a message and status 2, as argparse does."""
    if arguments.budget is None and len(arguments.sizes) == 1:
        parser.error("one size and no budget leaves nothing to swap: give --budget, or a second, larger size")
    if len(set(arguments.sizes)) < len(arguments.sizes):
        parser.error("--sizes names a size twice")
    try:
        options = Options.parse(arguments.budget or "auto", policy=arguments.policy)
    except OptionError as error:
        parser.error(str(error))
    return Settings(
        sizes=tuple(arguments.sizes),
        steps=arguments.steps,
        budget_bytes=options.budget_bytes,
        policy=options.policy,
        head=arguments.head,
        dtype=arguments.dtype,
        seed=arguments.seed,
        data=arguments.data,
        folder=arguments.folder,
    )


def _size(text: str) -> int:
    size = _positive(text)
    if size < MIN_SIZE or size % SIZE_MULTIPLE:
        raise argparse.ArgumentTypeError(f"{size} is not a multiple of {SIZE_MULTIPLE} from {MIN_SIZE} up")
    return size


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
