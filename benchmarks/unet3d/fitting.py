"""Finds the sizes that the demo can train in about three minutes on this machine, by a trial at a small size."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.unet3d import brats, synthetic
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.fresh import OnEvent, run_fresh
from benchmarks.unet3d.preprocess import prepare_cube

# Pairs whose second image has about 2.37 times the voxels of the first, as 192³ has of 144³; the smallest one always
# does, though its steps are too short for a ratio that means much.
CPU_PAIRS = ((96, 128), (64, 80), (48, 64))
GOAL_SECONDS = 180.0
_TRIAL_SIZE, TRIAL_STEPS = 48, 3
# What the demo takes beside its steps, and in plain steps of the larger size.
_FIXED_SECONDS, _LARGE_STEPS = 60.0, 26.0


def compute_threads() -> int:
    """Return torch's threads on a CPU, less one if there are more: copies need a core, as a GPU has copy engines.

    If all cores compute, copying takes as much of them as recomputing the cheapest tensors does.
    """
    return max(1, torch.get_num_threads() - 1)


def trial_seconds(folder: Path, threads: int, on_event: OnEvent) -> float:
    """What a plain step takes at 48³, in a process of its own that leaves its cubes and log in ``folder``.

    ``on_event`` is called with its events.

    Raises:
        DataError, RunFailed: subjects cannot be made, or the process did not finish.
    """
    synthetic.make_subjects(folder / "subjects", 1)
    (subject,) = brats.find_subjects(folder / "subjects")[:1]
    trial = Configuration(
        size=_TRIAL_SIZE,
        steps=TRIAL_STEPS,
        policy=None,
        budget_bytes=None,
        cap_bytes=None,
        head="conv",
        dtype="fp32",
        device="cpu",
        seed=0,
        cubes=(str(prepare_cube(subject, _TRIAL_SIZE, folder / "cubes")),),
        threads=threads,
        counts_tensors=False,
    )
    return statistics.median(run_fresh(trial, folder / "logs", on_event).timed_seconds)


def demo_seconds(large: int, trial_step_seconds: float) -> float:
    """What the demo takes in all with ``large`` as its second size, by the voxels of a step."""
    return _FIXED_SECONDS + _LARGE_STEPS * trial_step_seconds * (large / _TRIAL_SIZE) ** 3


def fitting_pair(trial_step_seconds: float) -> tuple[int, int]:
    """The largest sizes whose demo takes `GOAL_SECONDS` at most, or the smallest ones."""
    fits = (pair for pair in CPU_PAIRS if demo_seconds(pair[1], trial_step_seconds) <= GOAL_SECONDS)
    return next(fits, CPU_PAIRS[-1])
