"""The command `lmswap`: surveys this machine, plans captured programs, profiles, verifies.

Each command prints its result on standard output; an error of lmswap is one line on standard error, or a
refusal in several, and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import lmswap
from lmswap.cli import bench, diff, doctor, links, plan, profile, verify
from lmswap.errors import LmswapError, PlanInfeasible, without_path
from lmswap.reporting.text import print_result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2: refused or failed, with a sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = _num_own(arguments)
    options = make_parser().parse_args(arguments[:own], argparse.Namespace(words=arguments, rest=arguments[own:]))
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print_result("lmswap: interrupted", sys.stderr)
        return 128 + signal.SIGINT
    except LmswapError as error:
        text = str(error) if isinstance(error, PlanInfeasible) else " ".join(str(error).split())
        print_result(f"lmswap: {text}", sys.stderr)
        return 2
    except OSError as error:  # from a file to be written, or from the system
        what = f"'{error.filename}' cannot be used: " if error.filename else ""
        print_result(f"lmswap: {what}{without_path(error)}", sys.stderr)
        return 2


def _num_own(arguments: Sequence[str]) -> int:
    """Return the number of arguments to parse here: a benchmark and a profiled script have parsers of their own."""
    if arguments[:1] == ["bench"]:
        return 2
    return arguments.index("--") if arguments[:1] == ["profile"] and "--" in arguments else len(arguments)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their options; shell completion is generated from it."""
    parser = argparse.ArgumentParser(
        prog="lmswap",
        description="Trains PyTorch models under a memory budget by swapping tensors.",
        epilog="example: lmswap doctor",
    )
    parser.add_argument("--version", action="version", version=f"lmswap {lmswap.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (doctor, links, plan, diff, profile, verify, bench):
        command.add_to(commands)
    return parser
