"""`lmswap bench`: trains a benchmark network; each benchmark has a command line of its own."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lmswap.errors import OptionError

if TYPE_CHECKING:
    from lmswap.commands import Commands


def add_to(commands: Commands) -> None:
    """Declare the command; arguments after the benchmark's name are not parsed here."""
    parser = commands.add_parser(
        "bench",
        help="train a benchmark network with and without swapping",
        epilog="example: lmswap bench unet3d compare --sizes 96 128",
    )
    parser.add_argument("benchmark", choices=("unet3d",), help="its own options follow: lmswap bench unet3d --help")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark with the rest of the command line."""
    try:
        from benchmarks.unet3d import cli
    except ModuleNotFoundError as error:
        advice = "install lmswap with its extra: pip install 'lmswap[bench]'"
        raise OptionError(f"benchmark {options.benchmark} needs the package '{error.name}'; {advice}") from error
    return int(cli.main(options.rest))
