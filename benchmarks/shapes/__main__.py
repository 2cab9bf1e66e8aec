"""Steps whose inputs have other sizes each time, in turns with plain torch: ``python -m benchmarks.shapes``.

Each way trains from its first step in a process of its own: lmswap in a budget, lmswap on inputs padded to multiples of
64, torch.compile(dynamic=True), and plain torch. Goals: plain torch's bits, no step over the budget, and later steps of
at most 1.15 times plain torch's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks.console import make_console
from benchmarks.shapes.tasks import TASKS
from benchmarks.shapes.training import LMSWAP, WAYS, Timed, Training, train
from benchmarks.turns import train_in_turns
from benchmarks.unet3d.ending import run_to_end
from benchmarks.weights.run import PRELOAD

_EARLY = 20  # steps, of which the first sizes are traced
_LONG_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each way; 0, or 1 if lmswap failed, had other bits or exceeded its budget, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--budget", default="400MiB", help="of lmswap (400MiB)")
    parser.add_argument("--steps", type=int, default=120, help="(120)")
    options = parser.parse_args(argv)
    return run_to_end("shapes", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    console, has_failed = make_console(), False
    for name in options.tasks:
        trainings = [Training(name, way, options.budget, options.steps) for way in sorted(options.ways, key=WAYS.index)]
        found = train_in_turns(train, trainings, _died, preload=("benchmarks.shapes.training", *PRELOAD))
        for each in found:
            console.print(f"{name}, {each.training.way}: {sentence(each, found[0])}", highlight=False)
        own = [each for each in found if each.training.way == LMSWAP]
        has_failed |= any(each.detail or each.num_over or each.losses != found[0].losses for each in own)
    return int(has_failed)


def sentence(found: Timed, plain: Timed) -> str:
    """What one way measured, beside plain torch in the same turns."""
    if found.detail or not found.seconds:
        return found.detail
    ratios = [own / its for own, its in zip(found.seconds[_EARLY:], plain.seconds[_EARLY:], strict=True)]
    num_long = sum(each > _LONG_SECONDS for each in found.seconds)
    bits = "plain bits" if found.losses == plain.losses else "other losses"
    later = f", later ones {statistics.median(ratios):.3f} × plain torch's" if ratios else ""
    managed = (
        f"; {found.num_traces} traces and {found.num_sized_plans} plans for sizes that vary, "
        f"{found.num_over} steps over the budget"
        if found.num_traces
        else ""
    )
    return (
        f"{len(found.seconds)} steps in {sum(found.seconds):.1f} s, {num_long} of them over {_LONG_SECONDS:g} s"
        f"{later}; {bits}{managed}"
    )


def _died(training: Training, why: str) -> Timed:
    return Timed(training, detail=why)


if __name__ == "__main__":
    sys.exit(main())
