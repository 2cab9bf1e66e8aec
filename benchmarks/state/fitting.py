"""Steps that fit their budget, with the arguments for those that do not: ``python -m benchmarks.state.fitting``.

A model trains with ``lmswap.enable(model, "auto")`` and, in turns, with ``weights="swap"`` and ``optimizer=``, too. The
first is run twice: the ratio of both is what turns differ by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import lmswap
from benchmarks.console import make_console
from benchmarks.state.tasks import SIZES, TASKS, micro_batches
from benchmarks.turns import train_in_turns
from benchmarks.unet3d.ending import run_to_end
from benchmarks.weights.run import PRELOAD
from lmswap.hardware.device import default_device
from lmswap.hardware.memory import device_memory
from lmswap.ir.bytesize import format_bytes

_WARM_UP = 8  # steps: plans are final after the fifth
WITHOUT, WITH = "without", "with"


@dataclass(frozen=True)
class Training:
    """A task that is trained with the arguments or without, and how many steps are timed."""

    task: str
    size: str
    way: str
    device: str
    timed: int


@dataclass(frozen=True)
class Timed:
    """Seconds of each timed step, those of lmswap's own code in it, and bytes that it copies; or why there are none."""

    training: Training
    seconds: tuple[float, ...] = ()
    own_seconds: tuple[float, ...] = ()
    copied_bytes: int = 0
    detail: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a sentence for each task; 0, or 1 if one failed or copied anything, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state.fitting", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["gpt", "lora"], metavar="TASK")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the models (small)")
    parser.add_argument("--timed", type=int, default=20, metavar="STEPS", help="in turns (20)")
    options = parser.parse_args(argv)
    return run_to_end("fitting", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    device, console = default_device().type, make_console()
    has_failed = False
    for name in options.tasks:
        trainings = [Training(name, options.size, way, device, options.timed) for way in (WITHOUT, WITHOUT, WITH)]
        found = train_in_turns(train, trainings, _died, preload=("benchmarks.state.training", *PRELOAD))
        has_failed |= any(each.detail or each.copied_bytes for each in found)
        console.print(f"{name}: {sentence(*found)}", highlight=False)
    return int(has_failed)


def train(training: Training, wait_for_turn: Callable[[], None]) -> Timed:
    """Train in this process, which should be fresh; ``wait_for_turn`` is called before each timed step."""
    task, device = TASKS[training.task][training.size], torch.device(training.device)
    torch.manual_seed(0)
    model = task.on_host().to(device)
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad], **task.settings)
    if training.way == WITH:
        lmswap.enable(model, "auto", weights="swap", optimizer=optimizer)
    else:
        lmswap.enable(model, "auto")
    memory = device_memory(device)
    seconds, own_seconds = [], []
    for number in range(_WARM_UP + training.timed):
        batches = [[each.to(device) for each in batch] for batch in micro_batches(task, number)]
        if number >= _WARM_UP:
            wait_for_turn()
        memory.synchronize()
        started = time.perf_counter()
        for batch in batches:
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        memory.synchronize()
        seconds.append(time.perf_counter() - started)
        own_seconds.append(lmswap.report(model).own_seconds or 0.0)
    memory.close()
    report = lmswap.report(model)
    copied_bytes = sum(filter(None, (report.swapped_in_bytes, report.swapped_out_bytes, report.state_in_bytes)))
    return Timed(training, tuple(seconds[_WARM_UP:]), tuple(own_seconds[_WARM_UP:]), copied_bytes)


def sentence(without: Timed, again: Timed, given: Timed) -> str:
    """What the three measured: seconds, and the ratios of steps in the same turns with their quartiles."""
    if why := next((each.detail for each in (without, again, given) if each.detail), None):
        return why
    own, own_given = (1e3 * statistics.median(each.own_seconds) for each in (without, given))
    copied = f"; it copied {format_bytes(given.copied_bytes)}, and should copy nothing" if given.copied_bytes else ""
    return (
        f"a step takes {statistics.median(without.seconds):.3f} s, the same again {_ratio(again, without)}, "
        f"with weights= and optimizer= {_ratio(given, without)}; "
        f"lmswap's own time is {own:.2f} ms a micro-batch, with them {own_given:.2f} ms{copied}"
    )


def _ratio(one: Timed, other: Timed) -> str:
    ratios = [mine / its for mine, its in zip(one.seconds, other.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} × ({low:.3f} to {high:.3f})"


def _died(training: Training, why: str) -> Timed:
    return Timed(training, detail=why)


if __name__ == "__main__":
    sys.exit(main())
