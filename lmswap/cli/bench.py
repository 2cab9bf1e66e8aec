"""`lmswap bench`: names the command that took its place, for one release."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from lmswap.errors import OptionError

if TYPE_CHECKING:
    from lmswap.cli import Commands


def add_to(commands: Commands) -> None:
    """Declare the command, which the list of commands leaves out; arguments after the first are not parsed here."""
    parser = commands.add_parser("bench", description="Moved: python -m benchmarks.unet3d, in a checkout of lmswap.")
    parser.add_argument("benchmark", choices=("unet3d",))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Refuse with the new command line.

    Raises:
        OptionError: always.
    """
    command = shlex.join(["python", "-m", f"benchmarks.{options.benchmark}", *options.rest])
    raise OptionError(f"'lmswap bench' has moved out of the package; in a checkout of lmswap, run: {command}")
