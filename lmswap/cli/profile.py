"""`lmswap profile`: measures how busy device and link are, in steps of a training script or in a profiler's file."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lmswap.errors import OptionError
from lmswap.reporting.output_file import check_can_write
from lmswap.reporting.text import print_result

if TYPE_CHECKING:
    from lmswap.cli import Commands
    from lmswap.profiling.profile import Profile

_USAGE = "lmswap profile [options] -- python train.py ...\n       lmswap profile [--steps A:B] --read FILE"


def add_to(commands: Commands) -> None:
    """Declare the command; arguments after "--" are not parsed here."""
    parser = commands.add_parser(
        "profile",
        help="profile some steps of a training script",
        usage=_USAGE,
        epilog="example: lmswap profile --steps 5:10 --json figures.json -- python train.py",
    )
    parser.add_argument(
        "--tool", default="auto", help="auto (what works best here), kineto, nsys, nvprof, lmswap (its own record)"
    )
    parser.add_argument("--steps", metavar="A:B", help="steps A to B-1, from 0; default: 5:10")
    parser.add_argument("--epoch", type=int, help="count steps in this epoch, from 1; default: across all")
    parser.add_argument("--steps-per-epoch", type=int, metavar="N", help="for a script without a DataLoader")
    parser.add_argument("--stop", action="store_true", help="end the script when the steps are over")
    parser.add_argument("--read", metavar="FILE", help="a file that Kineto, nsys, nvprof or lmswap wrote before")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--trace", metavar="FILE", help="write what ran when there, for Perfetto")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the tools' own files there")
    parser.add_argument("stray", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # a script without "--" before it
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Profile or read; return 2 if swapping was not measured, the script's own exit code if it failed."""
    from lmswap.profiling.launch import ScriptFailed

    if options.stray:
        python = ["python"] if options.stray[0].endswith(".py") else []
        meant = shlex.join([*python, *options.stray])
        raise OptionError(
            f"'{options.stray[0]}' is no option; write what is profiled behind --: lmswap profile -- {meant}"
        )
    command = options.rest[1:]  # without "--"
    if bool(command) == bool(options.read):
        raise OptionError(f"give a command or a file to read: {' '.join(_USAGE.split())}")
    for path in filter(None, (options.json, options.trace)):
        check_can_write(path)
    try:
        profile = _read(options) if options.read else _profile(options, command)
    except ScriptFailed as error:
        print_result(f"lmswap: {error}", sys.stderr)
        return error.exit_code
    print_result(str(profile))
    if options.json:
        Path(options.json).write_text(profile.to_json(), encoding="utf-8")
    if options.trace:
        profile.to_chrome_trace(options.trace)
    return 0 if profile.is_valid else 2


def _read(options: argparse.Namespace) -> Profile:
    from lmswap.profiling.profile import Profile
    from lmswap.profiling.readers import read_traces
    from lmswap.profiling.window import parse_steps

    if options.epoch is not None or options.steps_per_epoch is not None:
        raise OptionError("a file numbers its steps without epochs: give --steps as they are numbered in it")
    traces = read_traces(options.read)
    if options.steps is not None:
        first, stop = parse_steps(options.steps)
        traces = tuple(trace.steps_between(first, stop) for trace in traces)
    return Profile(options.read, traces)


def _profile(options: argparse.Namespace, command: list[str]) -> Profile:
    from lmswap.profiling.launch import profile_command
    from lmswap.profiling.tools import choose, find_profilers
    from lmswap.profiling.window import Window

    window = Window.parse(options.steps, options.epoch, options.steps_per_epoch)
    tool, note = choose(options.tool, find_profilers())
    if note:
        print_result(f"lmswap: {note}", sys.stderr)  # now: the script may run for hours
    with tempfile.TemporaryDirectory(prefix="lmswap-profile-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        profile = profile_command(command, window, tool=tool, folder=folder.resolve(), stop=options.stop)
    profile.notes += [note] if note else []
    return profile
