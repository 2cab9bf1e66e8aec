"""Trains what exceeds its budget with optimizer state, in every way at the same peak: ``python -m benchmarks.state``.

Plain torch runs first, alone: the budget is a share of its peak, which parameters, gradients, optimizer state and
activations make together. The rate of copies lets those of all that exceeds the budget take ``--copy-share`` of its
step: each way, state once, and what exceeds it for each forward and backward. On a CPU lmswap and the others are paced
to that rate, and all ways step in turns. On a GPU copies run at the machine's own rate, one way after another.

Goals: plain torch's bits, every peak within the budget, and steps of at most 1.15 times plain torch's, or else 1.05
times the bound.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from rich.markdown import Markdown

from benchmarks.console import make_console
from benchmarks.peers.results import describe_origin
from benchmarks.state.run import run_task
from benchmarks.state.table import goals, lines
from benchmarks.state.tasks import SIZES, TASKS
from benchmarks.state.training import StateOutcome
from benchmarks.state.ways import WAYS
from benchmarks.unet3d.ending import run_to_end
from benchmarks.weights.arguments import add_arguments, check_room, choice_of, output_of
from benchmarks.weights.results import Records, Results, is_broken
from lmswap.errors import OptionError
from lmswap.hardware.device import default_device

SCHEMA = "lmswap.state/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments choose, and keep what is known after each way.

    0; 1 if lmswap failed, did not keep plain torch's bits, or exceeded its budget in any phase; 2 for what cannot be
    used, before anything is run; 130 for Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.state", *(sys.argv[1:] if argv is None else argv)])
    return run_to_end("state", lambda: _run(options, parser, command))


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser, command: str) -> int:
    device = default_device().type
    choices = {budget: choice_of(options, WAYS, device, budget) for budget in options.budget or [None]}
    names = [name for name in options.tasks or TASKS if options.size in TASKS[name]]
    if len(names) < len(options.tasks or ()):
        without = ", ".join(name for name in options.tasks if name not in names)
        raise OptionError(f"--size {options.size} is none of {without}")
    num_ways = len(next(iter(choices.values())).ways)
    check_room(num_ways, max(TASKS[name][options.size].nbytes for name in names), device)
    output = output_of(options, parser, device)
    origin = {**describe_origin(device, command), "note": options.note}
    results = Results(SCHEMA, "Training under a budget", output, origin, StateOutcome, lines)
    tasks = {
        f"{name}, {budget}" if budget else name: partial(run_task, choice, name)
        for name in names
        for budget, choice in choices.items()
    }
    console = make_console()
    for way, refusal in ((way, WAYS[way].refusal(device)) for way in options.ways or WAYS):
        if refusal is not None:
            console.print(f"{way} {refusal}", highlight=False)
    found = results.run(
        tasks,
        num_outcomes=num_ways + 2,
        resumes=options.resume,
        show=lambda ended: console.print(Markdown("\n".join(lines(ended)))),
    )
    return int(any(map(is_broken, found.values())) or _exceeds_budget(found))


def _exceeds_budget(found: Records) -> bool:
    return any((reached := goals(outcomes)) is not None and "peak" in reached.missed for outcomes in found.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, tasks=TASKS, ways=WAYS, sizes=SIZES)
    parser.set_defaults(tasks=None)
    parser.add_argument("--share", type=float, default=0.35, help="of plain torch's peak: the budget (0.35)")
    parser.add_argument("--budget", nargs="+", help="instead of a share, one after the other")
    return parser


if __name__ == "__main__":
    sys.exit(main())
