"""Arguments that several commands share, and their validation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.unet3d.network import MIN_SIZE, SIZE_MULTIPLE
from lmswap.errors import OptionError
from lmswap.options import Options


def size(text: str) -> int:
    """Parses a cube side that the network accepts, in voxels."""
    side = positive(text)
    if side < MIN_SIZE or side % SIZE_MULTIPLE:
        raise argparse.ArgumentTypeError(f"{side} is not a multiple of {SIZE_MULTIPLE} from {MIN_SIZE} up")
    return side


def positive(text: str) -> int:
    """Parses a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def seed(text: str) -> int:
    """Parses an integer that numpy and torch both accept as a seed."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return int(text)


def add_network(parser: argparse.ArgumentParser) -> None:
    """Declares what a trained network depends on beside the data and the size."""
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 means autocast (%(default)s)")
    parser.add_argument(
        "--head", choices=("conv", "block"), default="conv", help="block: as the case study (%(default)s)"
    )


def add_folder(parser: argparse.ArgumentParser, holds: str) -> None:
    """Declares where files go that later commands use again."""
    parser.add_argument(
        "--folder", type=Path, default=Path("demo-output"), metavar="DIR", help=f"for {holds} (%(default)s)"
    )


def add_enable(parser: argparse.ArgumentParser, *, without: str) -> None:
    """Declares what goes on to `lmswap.enable`; ``without`` a budget it is not called."""
    parser.add_argument("--budget", help=f'bytes or "6GiB" for lmswap; default: {without}')
    parser.add_argument("--policy", help="how lmswap chooses what to swap (default: auto)")
    parser.add_argument("--link", help='a slower link that lmswap is to emulate, "11.7GB/s"')


def enable_arguments(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The arguments of `lmswap.enable` that the command line gives; None without a budget.

    Raises:
        OptionError: they are not valid, or would have no effect.
    """
    given = {
        name: getattr(arguments, name) for name in ("budget", "policy", "link") if getattr(arguments, name) is not None
    }
    if not given:
        return None
    if "budget" not in given:
        raise OptionError(f"--{next(iter(given))} has no effect without --budget, as nothing is swapped then")
    Options.parse(**given)
    return given
