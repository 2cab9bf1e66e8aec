"""The slowdown of trainings that share a link: the case study's Tables 2, 3 and 5.

Where there are several GPUs each training has one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.case_study.links import format_rate
from benchmarks.case_study.published import EPOCH_ROWS, SYSTEMS, EpochRow, System
from benchmarks.case_study.results import Ladder, LinkRuns, Links, Replicas, Together, without_curves
from benchmarks.case_study.runner import Runner
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.fresh import RunFailed
from benchmarks.unet3d.measured import Failure, Run


def run_replicas(runner: Runner, ladder: Ladder, links: Links, folder: Path) -> Replicas:
    """Sets several trainings at once beside one alone: without swapping, over a link each, over the contended link.

    Those alone are runs of ``ladder`` and ``links``. ``folder`` takes the files by which processes share a paced link.
    """
    settings, num_devices = runner.settings, torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices)))).split(",")
    environments = [
        {"CUDA_VISIBLE_DEVICES": visible[n % num_devices]} if num_devices else {} for n in range(settings.replicas)
    ]
    found: list[Together] = []
    failures: list[Failure] = []

    def attempt(row: EpochRow, system: str | None, configuration: Configuration) -> None:
        # Independent trainings: each has weights and dropout of its own.
        configurations = [replace(configuration, seed=seed) for seed in range(settings.replicas)]
        title = EPOCH_ROWS[row].format(many=settings.replicas, small=settings.small, large=settings.large)
        runner.console.print(title + (f": {system}" if system else ""), highlight=False)
        try:
            runs = runner.run_together(configurations, environments)
        except RunFailed as failure:
            failures.append(Failure(configuration, f"{settings.replicas} at once: {failure}"))
        else:
            found.append(Together(row, system, tuple(map(without_curves, runs)), seconds_while_all_train(runs)))

    found += _alone("small", None, ladder.of(settings.small, "unswapped"))
    attempt("small_each", None, runner.configuration(settings.small, "none"))
    for system in SYSTEMS:
        link = links.of(system.key)
        if link is None or not link.of("auto"):
            continue
        found += _alone("large", system.key, link.of("auto"))
        over = partial(runner.configuration, settings.large, "auto", link=link.link, tier=link.tier, **ladder.limits)
        if link.link is None:  # it is the device's own and there once: several trainings can only share it
            attempt("large_contended", system.key, over(is_planned=True))
        else:
            attempt("large_each", system.key, over(is_planned=True))
            attempt("large_contended", system.key, _contended(over(), link, system, folder))
    return Replicas(num_devices, tuple(found), tuple(failures))


def _alone(row: EpochRow, system: str | None, runs: Sequence[Run]) -> list[Together]:
    """The last of ``runs``, the nearest in time, as a row of one training; empty without runs."""
    return [Together(row, system, (without_curves(run),), (run.seconds_per_step,)) for run in runs[-1:]]


def _contended(configuration: Configuration, link: LinkRuns, system: System, folder: Path) -> Configuration:
    """``configuration`` with the link of several GPUs of ``system``: one shared by all, or a slower one for each."""
    if system.contended_share is None:
        shared = folder / f"{system.key}.link"
        shared.unlink(missing_ok=True)  # an aborted run's may be of another rate
        return replace(configuration, link_file=str(shared))
    return replace(configuration, link=format_rate(system.contended_share * link.bytes_per_second))


def seconds_while_all_train(runs: Sequence[Run]) -> tuple[float, ...]:
    """By run: median seconds of the timed steps that ended before the first of the runs finished."""
    first_end = min(run.step_ends[-1] for run in runs)
    medians = []
    for run in runs:
        warm_up = run.configuration.warm_up_steps
        timed = zip(run.step_ends[warm_up:], run.step_seconds[warm_up:], strict=True)
        beside = [seconds for end, seconds in timed if end <= first_end]
        medians.append(statistics.median(beside or run.timed_seconds))
    return tuple(medians)
