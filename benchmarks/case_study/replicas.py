"""What do trainings cost each other when they share a link? The case study's Tables 2, 3 and 5.

Where there are several GPUs each training has one. On a CPU each has its share of the cores, always the same one, so
that what changes with their number is the link alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.case_study.links import basis_of, choose_links, format_rate
from benchmarks.case_study.published import EPOCH_ROWS, SYSTEMS, EpochRow, System
from benchmarks.case_study.results import Ladder, LinkRuns, Replicas, Together, without_curves
from benchmarks.case_study.runner import Runner
from benchmarks.unet3d.run import Configuration, Run
from benchmarks.unet3d.study import Failure, RunFailed


def run_replicas(runner: Runner, ladder: Ladder, folder: Path) -> Replicas | None:
    """Trains one model and several at once, without swapping, over a link each, and over the contended link.

    Links have the systems' ratios for these trainings, which on a CPU compute more slowly. ``folder`` takes the files
    by which processes share a paced link. None where the ladder found no budget.
    """
    if ladder.budget_bytes is None:
        return None
    settings, num_devices = runner.settings, torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices)))).split(",")
    threads = None if num_devices else max(1, torch.get_num_threads() // settings.replicas)
    small = runner.configuration(settings.small, "none", threads=threads)
    found: list[Together] = []
    failures: list[Failure] = []

    def attempt(row: EpochRow, system: str | None, configuration: Configuration, count: int) -> None:
        # Independent trainings: each has weights and dropout of its own.
        configurations = [replace(configuration, seed=seed) for seed in range(count)]
        devices = [{"CUDA_VISIBLE_DEVICES": visible[n % num_devices]} if num_devices else {} for n in range(count)]
        title = EPOCH_ROWS[row].format(many=count, small=settings.small, large=settings.large)
        runner.console.print(title + (f": {system}" if system else ""), highlight=False)
        try:
            runs = runner.run_together(configurations, devices)
        except RunFailed as failure:
            failures.append(Failure(configuration, f"{count} at once: {failure}"))
        else:
            found.append(Together(row, system, tuple(map(without_curves, runs)), seconds_while_all_train(runs)))

    attempt("small", None, small, 1)
    attempt("small_each", None, small, settings.replicas)
    basis = basis_of([run for together in found[:1] for run in together.runs])
    links = [] if basis is None else choose_links(settings.device, basis)[: len(SYSTEMS)]
    for system, link in zip(SYSTEMS, links, strict=False):
        limits = {"budget_bytes": ladder.budget_bytes, "cap_bytes": ladder.cap_bytes}
        over = {"link": link.link, "tier": link.tier, "threads": threads}
        large = runner.configuration(settings.large, "auto", **over, **limits)
        attempt("large", system.key, large, 1)
        # A device's own link is there once: several trainings can only share it.
        if link.link is not None:
            again = runner.configuration(settings.large, "auto", is_planned=True, **over, **limits)
            attempt("large_each", system.key, again, settings.replicas)
        (folder / f"{system.key}.link").unlink(missing_ok=True)  # an aborted run's may be of another rate
        attempt("large_contended", system.key, _contended(large, link, system, folder), settings.replicas)
    return Replicas(threads, num_devices, tuple(links), tuple(found), tuple(failures))


def _contended(configuration: Configuration, link: LinkRuns, system: System, folder: Path) -> Configuration:
    """``configuration`` over what the system has for more GPUs: the same link for all, or a slower one for each."""
    if link.link is None:
        return configuration
    if system.contended_share is None:
        return replace(configuration, link_file=str(folder / f"{system.key}.link"))
    return replace(configuration, link=format_rate(system.contended_share * link.bytes_per_second))


def seconds_while_all_train(runs: Sequence[Run]) -> tuple[float, ...]:
    """By run: the median of the timed steps that ended before the first of the runs had finished."""
    first_end = min(run.step_ends[-1] for run in runs)
    medians = []
    for run in runs:
        warm_up = run.configuration.warm_up_steps
        timed = zip(run.step_ends[warm_up:], run.step_seconds[warm_up:], strict=True)
        beside = [seconds for end, seconds in timed if end <= first_end]
        medians.append(statistics.median(beside or run.timed_seconds))
    return tuple(medians)
