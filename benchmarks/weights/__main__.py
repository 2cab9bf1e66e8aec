"""Runs models larger than their budget in every way at the same peak: ``python -m benchmarks.weights``.

Plain torch runs first, alone: the budget is a share of its peak, and the rate of copies is what lets copies of all that
exceeds the budget take ``--copy-share`` of its step. On a CPU lmswap paces its disk to that rate (its option ``link``),
and the others read weights from a file through the same page cache, paced by the same rule. Then all ways step in
turns. On a GPU copies run at the machine's own rate, one way after another.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.peers.results import describe_origin
from benchmarks.unet3d.ending import run_to_end
from benchmarks.weights.arguments import add_arguments, check_room, choice_of, output_of
from benchmarks.weights.outcomes import Outcome
from benchmarks.weights.results import Results, is_broken
from benchmarks.weights.run import run_task
from benchmarks.weights.table import lines
from benchmarks.weights.tasks import NAMES, SIZES, on_meta
from benchmarks.weights.ways import WAYS
from lmswap.errors import OptionError
from lmswap.hardware.device import default_device
from lmswap.reporting.text import print_result

SCHEMA = "lmswap.weights/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments choose, and keep what is known after each way.

    0; 1 if lmswap failed, did not keep plain torch's bits, or exceeded its budget; 2 for what cannot be used, before
    anything is run; 130 for Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.weights", *(sys.argv[1:] if argv is None else argv)])
    return run_to_end("weights", lambda: _run(options, parser, command))


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser, command: str) -> int:
    device = default_device().type
    choice = choice_of(options, WAYS, device, options.budget)
    if min(options.tokens or [1]) < 1:
        raise OptionError("--tokens are at least 1")
    nbytes = max(sum(p.nbytes for p in on_meta(name, options.size).parameters()) for name in options.tasks)
    check_room(len(choice.ways), nbytes, device)
    output = output_of(options, parser, device)
    origin = {**describe_origin(device, command), "note": options.note}
    results = Results(SCHEMA, "Weights under a budget", output, origin, Outcome, lines)
    tasks = {
        f"{name}, {tokens} tokens" if tokens else name: partial(run_task, choice, name, tokens)
        for name in options.tasks
        for tokens in ((options.tokens or [None]) if name.startswith("decoder") else [None])
    }
    found = results.run(
        tasks,
        num_outcomes=len(choice.ways) + 2,
        resumes=options.resume,
        show=lambda ended: print_result("\n".join(lines(ended))),
    )
    return int(any(map(is_broken, found.values())))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__.splitlines()[0])
    add_arguments(parser, tasks=NAMES, ways=WAYS, sizes=SIZES)
    parser.add_argument("--tokens", nargs="+", type=int, help="of a decoder's sequences, instead of the size's")
    parser.add_argument("--share", type=float, default=0.4, help="of plain torch's peak: the budget (0.4)")
    parser.add_argument("--budget", help="instead of a share")
    return parser


if __name__ == "__main__":
    sys.exit(main())
