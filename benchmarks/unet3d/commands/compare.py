"""`compare`: measures what swapping and its budget cost, at any sizes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.console import make_console
from benchmarks.unet3d.commands.arguments import add_folder, add_network, positive, seed, size
from benchmarks.unet3d.console import ProgressView, print_study
from benchmarks.unet3d.study import Settings, compare
from benchmarks.unet3d.verdict import judge
from lmswap.errors import OptionError
from lmswap.options import Options

if TYPE_CHECKING:
    from lmswap.cli import Commands


def add_to(commands: Commands) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "compare",
        help="train some steps at several sizes, with and without lmswap, and compare memory, time and bits",
        description="Trains the 3D U-Net at several image sizes: plainly, and under a memory budget with swapping. "
        "Compares memory, time and the bits of losses and weights. Each run is a process of its own.",
        epilog="example: python -m benchmarks.unet3d compare --sizes 96 128 --steps 5",
    )
    parser.add_argument("--sizes", type=size, nargs="+", required=True, metavar="N", help="cube sides, multiples of 16")
    parser.add_argument("--budget", help='bytes or "6GiB"; default: the peak of the first size without lmswap')
    parser.add_argument("--policy", default="auto", help="how lmswap chooses what to swap (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a BraTS folder; default: synthetic subjects")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="training steps a run (%(default)s)")
    add_network(parser)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights and dropout (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    add_folder(parser, "subjects, cubes and logs")
    parser.set_defaults(run=partial(run, parser=parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compares; 0 if all runs finished in budget with equal bits, 1 if not."""
    settings = read_settings(arguments, parser)
    console = make_console()
    with ProgressView(console) as view:
        study = compare(settings, view.on_event, command=arguments.command_line)
    verdicts = judge(study)
    print_study(console, study, verdicts)
    if arguments.json is not None:
        study.write(arguments.json)
    return int(any(verdict.holds is False for verdict in verdicts))


def read_settings(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """Checks what argparse cannot; ends the program with a message and status 2, as argparse does."""
    if arguments.budget is None and len(arguments.sizes) == 1:
        parser.error("one size and no budget leaves nothing to swap: give --budget, or a second, larger size")
    if arguments.json is not None and arguments.json.is_dir():
        parser.error(f"--json {arguments.json} is a folder: name a file")
    if len(set(arguments.sizes)) < len(arguments.sizes):
        parser.error("--sizes names a size twice")
    try:
        options = Options.parse(arguments.budget or "auto", policy=arguments.policy)
        if arguments.budget is not None and options.budget_bytes is None:
            parser.error(f"--budget {arguments.budget} is not the same for all sizes: give bytes, as in 6GiB")
    except OptionError as error:
        parser.error(str(error))
    return Settings(
        sizes=tuple(arguments.sizes),
        steps=arguments.steps,
        budget_bytes=options.budget_bytes,
        policies=(options.policy,),
        head=arguments.head,
        dtype=arguments.dtype,
        seed=arguments.seed,
        data=arguments.data,
        folder=arguments.folder,
    )
