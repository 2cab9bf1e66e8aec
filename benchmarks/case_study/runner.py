"""Training and measurement of one configuration, alone or with others, in fresh processes with progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.case_study.results import Settings
from benchmarks.unet3d import brats, synthetic
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.console import ProgressView
from benchmarks.unet3d.fresh import FreshRun, run_compared, warmed_up
from benchmarks.unet3d.measured import Failure, Run
from benchmarks.unet3d.preprocess import prepare_cube
from benchmarks.unet3d.study import MAX_SUBJECTS

MADE_SUBJECTS = 12  # where no data is given: enough for a table of boxes
# Policy auto plans again before the fourth step if the third showed that a new plan may not be the best.
WARM_UP_STEPS = 4
# With others the first step captures and compiles, and the second finds the memory of the first.
OTHER_WARM_UP_STEPS = 2


@contextmanager
def sharing_cores(device: str, num_trainings: int) -> Iterator[None]:
    """On a CPU gives torch meanwhile what each of ``num_trainings`` has of the cores if all train at once.

    So they compete for the link and not for cores. One core is left to the copies: a GPU has engines for them, which
    take nothing from its cores.
    """
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(max(1, (before - 1) // num_trainings))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Trial(NamedTuple):
    """A configuration to run, and the lists that its run or failure is appended to."""

    configuration: Configuration
    runs: list[Run]
    failures: list[Failure]


class Runner:
    """Trains on the first subjects of the data; ``folder`` takes synthetic subjects, cubes and logs."""

    def __init__(self, settings: Settings, folder: Path, console: Console) -> None:
        """Find the subjects, or make synthetic ones in ``folder``, which gets cubes and logs, too.

        Raises:
            DataError: the scans cannot be used.
        """
        self.settings, self.console, self._folder = settings, console, folder
        root = Path(settings.data) if settings.data is not None else folder / "subjects"
        if settings.data is None:
            synthetic.make_subjects(root, MADE_SUBJECTS)
        self.subjects = brats.find_subjects(root)
        self.data = synthetic.DATA_KIND if synthetic.is_made(root) else "BraTS layout, as given"

    def configuration(
        self, size: int, policy: str | None, *, is_planned: bool = False, **changes: Any
    ) -> Configuration:
        """Return the configuration of one training.

        Args:
            size: voxels along a side.
            policy: None: plain torch, without lmswap.
            is_planned: the same was trained before, so that its final plan comes from the cache.
            changes: other fields of `Configuration`, such as ``budget_bytes``, which is None otherwise.
        """
        settings = self.settings
        subjects = self.subjects[:MAX_SUBJECTS]
        warm_up_steps = WARM_UP_STEPS if policy == "auto" and not is_planned else OTHER_WARM_UP_STEPS
        plain = Configuration(
            size=size,
            steps=warm_up_steps + settings.timed_steps,
            policy=policy,
            budget_bytes=None,
            cap_bytes=None,
            head=settings.head,
            dtype=settings.dtype,
            device=settings.device,
            seed=settings.seed,
            cubes=tuple(str(prepare_cube(subject, size, self._folder / "cubes")) for subject in subjects),
            warm_up_steps=warm_up_steps,
            counts_tensors=False,
            threads=torch.get_num_threads() if settings.device == "cpu" else None,
        )
        return replace(plain, **changes)

    def attempt(self, configuration: Configuration, runs: list[Run], failures: list[Failure]) -> Run | None:
        """Run one configuration, append the outcome to ``runs`` or ``failures``, and return the run, if it finished."""
        known = len(runs)
        self.compare([Trial(configuration, runs, failures)], needed_bytes=0)
        return runs[-1] if len(runs) > known else None

    def compare(self, trials: Sequence[Trial], needed_bytes: int) -> None:
        """Run the trials and append each outcome to its runs or failures; see `run_compared` for ``needed_bytes``."""
        with ProgressView(self.console) as view:
            configurations = [trial.configuration for trial in trials]
            outcomes = run_compared(configurations, self._folder / "logs", view.on_event, needed_bytes)
        for trial, outcome in zip(trials, outcomes, strict=True):
            if isinstance(outcome, Failure):
                trial.failures.append(outcome)
                self.console.print(
                    f"[red]{outcome.configuration.name} did not finish:[/] {outcome.message}", highlight=False
                )
            else:
                trial.runs.append(outcome)

    def run_together(
        self, configurations: Sequence[Configuration], environments: Sequence[Mapping[str, str]]
    ) -> tuple[Run, ...]:
        """Train all configurations at once, after each has warmed up alone, so that no plan is made from shared times.

        Args:
            configurations: one for each process.
            environments: the variables added to ours, by configuration.

        Returns:
            The runs, in the order of the configurations.

        Raises:
            RunFailed: one did not finish, so the others did not compete with it; they are ended.
        """
        with ProgressView(self.console) as view, ExitStack() as stack:
            begun: list[FreshRun] = []
            for number, (configuration, environment) in enumerate(zip(configurations, environments, strict=True)):
                logs = self._folder / "logs" / f"replica-{number}"
                begun.append(stack.enter_context(warmed_up(configuration, logs, view.on_event, environment)))
                if begun[-1].has_ended:
                    begun[-1].finish()  # raises: it ended before its timed steps
            with ThreadPoolExecutor(len(begun)) as pool:
                return tuple(pool.map(lambda run: run.finish(), begun))
