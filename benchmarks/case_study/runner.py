"""How is a configuration trained and measured, alone or beside others? Fresh processes, shown while they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.case_study.results import Settings
from benchmarks.unet3d import brats, synthetic
from benchmarks.unet3d.console import ProgressView
from benchmarks.unet3d.preprocess import prepare_cube
from benchmarks.unet3d.run import Configuration, Run
from benchmarks.unet3d.study import MAX_SUBJECTS, Failure, RunFailed, run_fresh

MADE_SUBJECTS = 12  # where no data is given: enough for a table of boxes
# Under a budget lmswap plans again before the fourth step if the third took another time than predicted.
WARM_UP_STEPS = 4
# Without one the first step captures and compiles, and the second finds the memory of the first.
FREE_WARM_UP_STEPS = 2


@contextmanager
def leaving_a_core(device: str) -> Iterator[None]:
    """On a CPU lets torch compute on all cores but one meanwhile.

    The copies get that one: a GPU has engines for them, which take nothing from its cores.
    """
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(max(1, before - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Runner:
    """Trains on the first subjects of the data; ``folder`` takes made subjects, cubes and logs."""

    def __init__(self, settings: Settings, folder: Path, console: Console) -> None:
        """Makes the subjects where no data is given.

        Raises:
            DataError: the scans cannot be used.
        """
        self.settings, self.console, self._folder = settings, console, folder
        root = Path(settings.data) if settings.data is not None else folder / "subjects"
        if settings.data is None:
            synthetic.make_subjects(root, MADE_SUBJECTS)
        self.subjects = brats.find_subjects(root)
        self.data = synthetic.DATA_KIND if synthetic.is_made(root) else "BraTS layout, as given"

    def configuration(self, size: int, policy: str | None, **changes: Any) -> Configuration:
        """One training of ``size`` by ``policy``, without a budget unless ``changes`` give one."""
        settings = self.settings
        subjects = self.subjects[:MAX_SUBJECTS]
        warm_up_steps = FREE_WARM_UP_STEPS if policy in (None, "none") else WARM_UP_STEPS
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
        """Runs one configuration; what comes of it goes to ``runs`` or ``failures``."""
        try:
            with ProgressView(self.console) as view:
                runs.append(run_fresh(configuration, self._folder / "logs", view.on_event))
        except RunFailed as failure:
            failures.append(Failure(configuration, str(failure)))
            self.console.print(f"[red]{configuration.name} did not finish:[/] {failure}", highlight=False)
            return None
        return runs[-1]

    def run_together(
        self, configurations: Sequence[Configuration], environments: Sequence[Mapping[str, str]]
    ) -> tuple[Run, ...]:
        """Lets all of them train at once; they warm up one by one, so that no plan is made from times beside others.

        Raises:
            RunFailed: one did not finish, so the others did not compete with it; they are ended.
        """
        barrier = threading.Barrier(len(configurations))
        with ProgressView(self.console) as view, ThreadPoolExecutor(len(configurations)) as pool:
            futures: list[Future[Run]] = []
            for number, (configuration, environment) in enumerate(zip(configurations, environments, strict=True)):
                is_ready = threading.Event()

                def meet(is_ready: threading.Event = is_ready) -> None:
                    is_ready.set()
                    barrier.wait()

                logs = self._folder / "logs" / f"replica-{number}"
                future = pool.submit(
                    run_fresh, configuration, logs, view.on_event, when_ready=meet, environment=environment
                )
                future.add_done_callback(lambda done: barrier.abort() if done.exception() else None)
                futures.append(future)
                while not (is_ready.wait(0.1) or future.done()):
                    pass
                if future.done():
                    break
            wait(futures)
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return tuple(future.result() for future in futures)
