"""What do trainings cost each other when they share a link? The case study's Tables 2, 3 and 5.

Where there are several GPUs each training has one. On a CPU each has its share of the cores, always the same one, so
that what changes with their number is the link alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.case_study.links import format_rate, system_of
from benchmarks.case_study.published import EPOCH_ROWS, EpochRow
from benchmarks.case_study.results import Ladder, LinkRuns, Links, Replicas, Together, without_curves
from benchmarks.case_study.runner import Runner
from benchmarks.unet3d.run import Configuration, Run
from benchmarks.unet3d.study import Failure, RunFailed


def run_replicas(runner: Runner, ladder: Ladder, links: Links, folder: Path) -> Replicas:
    """Trains one model and several at once, without swapping, over a link each, and over the contended link.

    ``folder`` takes the files by which processes share a paced link.
    """
    many, num_devices = runner.settings.replicas, torch.cuda.device_count()
    threads = None if num_devices else max(1, torch.get_num_threads() // many)
    small = runner.configuration(runner.settings.small, "none", threads=threads)
    found: list[Together] = []
    failures: list[Failure] = []

    def attempt(row: EpochRow, system: str | None, configuration: Configuration, count: int) -> None:
        # Independent trainings: each has weights and dropout of its own.
        configurations = [replace(configuration, seed=seed) for seed in range(count)]
        devices = [{"CUDA_VISIBLE_DEVICES": str(n % num_devices)} if num_devices else {} for n in range(count)]
        runner.console.print(EPOCH_ROWS[row].format(many=count, small=small.size, large=configuration.size), system)
        try:
            runs = runner.run_together(configurations, devices)
        except RunFailed as failure:
            failures.append(Failure(configuration, f"{count} at once: {failure}"))
        else:
            found.append(Together(row, system, tuple(map(without_curves, runs)), seconds_while_all_train(runs)))

    attempt("small", None, small, 1)
    attempt("small_each", None, small, many)
    for link in links.links:
        limits = {"budget_bytes": ladder.budget_bytes, "cap_bytes": ladder.cap_bytes, "tier": link.tier}
        large = runner.configuration(runner.settings.large, "auto", threads=threads, link=link.link, **limits)
        attempt("large", link.system, large, 1)
        # A device's own link is there once: several trainings can only share it.
        if link.link is not None:
            attempt("large_each", link.system, large, many)
        attempt("large_contended", link.system, _contended(large, link, folder), many)
    return Replicas(threads, num_devices, tuple(found), tuple(failures))


def _contended(configuration: Configuration, link: LinkRuns, folder: Path) -> Configuration:
    """``configuration`` over what the system has for more GPUs: the same link for all, or a slower one for each."""
    share = system_of(link).contended_share
    if link.link is None:
        return configuration
    if share is None:
        return replace(configuration, link_file=str(folder / f"{link.system}.link"))
    return replace(configuration, link=format_rate(share * link.bytes_per_second))


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
