"""``lmswap bench unet3d``: parses a command line and runs one of its commands."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.commands import compare, evaluate, train
from benchmarks.unet3d.memory import MeasurementError
from lmswap.reporting.text import print_result


def main(argv: Sequence[str]) -> int:
    """Runs the command line; what the command returns, 2 for bad input."""
    line = argparse.Namespace(command_line=f"lmswap bench unet3d {shlex.join(argv)}")
    arguments = make_parser().parse_args(argv, line)
    try:
        return int(arguments.run(arguments))
    except (DataError, MeasurementError) as error:
        print_result(f"lmswap: {error}", sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The commands of ``lmswap bench unet3d`` and their options."""
    parser = argparse.ArgumentParser(
        prog="lmswap bench unet3d",
        description="The 3D U-Net of the case study, with and without swapping.",
        epilog="example: lmswap bench unet3d compare --sizes 96 128",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (compare, train, evaluate):
        command.add_to(commands)
    return parser
