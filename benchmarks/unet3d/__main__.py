"""The 3D U-Net of the case study, with and without swapping: `python -m benchmarks.unet3d`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from benchmarks.unet3d.commands import compare, evaluate, train
from benchmarks.unet3d.ending import run_to_end

_COMMAND = "python -m benchmarks.unet3d"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2: bad input, 130: Ctrl-C, each with a sentence on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(words, argparse.Namespace(command_line=f"{_COMMAND} {shlex.join(words)}"))
    return run_to_end("unet3d", lambda: int(arguments.run(arguments)))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their options."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description="The 3D U-Net of the case study on the first GPU, else the CPU, with and without swapping.",
        epilog=f"example: {_COMMAND} compare --sizes 96 128",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (compare, train, evaluate):
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
