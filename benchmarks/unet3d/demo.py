"""``make demo``: trains an image of about twice the voxels in the memory that the smaller one takes, and shows it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.console import make_console
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.commands.arguments import size
from benchmarks.unet3d.console import ProgressView, print_study
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.fitting import TRIAL_STEPS, compute_threads, demo_seconds, fitting_pair, trial_seconds
from benchmarks.unet3d.plot import drawn_runs, plot_step
from benchmarks.unet3d.study import Settings, compare
from benchmarks.unet3d.verdict import judge, judge_copies
from lmswap.hardware.device import default_device
from lmswap.reporting.text import format_seconds

FOLDER = Path("demo-output")
GPU_SIZES = (144, 192)  # the case study's
EMULATED = "Emulated GPU"  # as tools/emulated_gpu names itself
STEPS = 7  # the first warms up, before the fourth and the fifth it may be planned again; seconds are the others' median


def main(sizes: Sequence[str]) -> int:
    """Runs the demo, on two other ``sizes`` if they are given; 0 if everything that it claims was measured to be so.

    1 if not; 2 for what cannot be used, and 130 for Ctrl-C, with a sentence on standard error.
    """
    return run_to_end("lmswap demo", lambda: _run(sizes, make_console()))


def _run(sizes: Sequence[str], console: Console) -> int:
    gpu = torch.cuda.get_device_name() if default_device().type == "cuda" else ""
    threads = None if gpu else compute_threads()
    small, large = _asked(sizes) if sizes else GPU_SIZES if threads is None else _fitting_pair(console, threads)
    console.print(
        f"[bold]lmswap demo[/]{gpu and f' on {gpu}'}: {large}³, {(large / small) ** 3:.2f} × the voxels of {small}³, "
        f"in the memory of {small}³{_spared_core(threads)}:\n"
        f"{small}³ plain: its peak is the budget\n"
        f"{large}³ plain: without lmswap\n"
        f"{large}³ swapped: by the fastest plan, which may also recompute\n"
        f"{large}³ swapped-only: by copies alone\n"
        f"{large}³ unswapped: in lmswap's graphs, without a budget",
        highlight=False,
    )
    settings = Settings(
        sizes=(small, large),
        steps=STEPS,
        budget_bytes=None,
        policies=("auto", "swap"),
        head="conv",
        dtype="fp32",
        seed=0,
        data=None,
        folder=FOLDER,
        threads=threads,
    )
    command = "make demo" + " DEVICE=emulated" * (gpu == EMULATED) + (f' SIZES="{small} {large}"' if sizes else "")
    with ProgressView(console) as view:
        study = compare(settings, view.on_event, command=command)
    study.write(FOLDER / "results.json")
    only = study.find(large, "swapped-only")
    verdicts = [*judge(study), *([judge_copies(only)] if only is not None else [])]
    print_study(console, study, verdicts)
    written = [FOLDER / "results.json"]
    if drawn_runs(study, large):
        written.append(FOLDER / "memory.png")
        plot_step(study, large, written[-1])
    console.print(f"\nWritten: {', '.join(map(str, written))}", highlight=False)
    return int(any(verdict.holds is False for verdict in verdicts))


def _asked(sizes: Sequence[str]) -> tuple[int, int]:
    """The sizes that were given.

    Raises:
        DataError: they are not two that the network takes, the second larger.
    """
    try:
        small, large = map(size, sizes)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise DataError(f'SIZES takes two sizes, as in SIZES="96 128", not "{" ".join(sizes)}": {error}') from error
    if small >= large:
        raise DataError(f"SIZES takes the size that sets the budget, then a larger one, not {small} {large}")
    return small, large


def _spared_core(threads: int | None) -> str:
    """How many threads compute, where one of torch's is spared for the copies."""
    if threads in (None, torch.get_num_threads()):
        return ""
    return f", each on {threads} of {threads + 1} threads: one is left to the copies, for which a GPU has engines"


def _fitting_pair(console: Console, threads: int) -> tuple[int, int]:
    """The sizes for this machine, and why they are these."""
    console.print(f"A trial of {TRIAL_STEPS} steps at 48³ finds sizes that take this machine about three minutes:")
    with ProgressView(console) as view:
        step_seconds = trial_seconds(FOLDER, threads, view.on_event)
    small, large = fitting_pair(step_seconds)
    minutes = demo_seconds(large, step_seconds) / 60
    console.print(
        f"A step at 48³ takes {format_seconds(step_seconds)} here: {small}³ and {large}³ should take {minutes:.0f} "
        'minutes in all. make demo SIZES="96 128" chooses otherwise.',
        highlight=False,
    )
    return small, large


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
