"""How is a configuration trained and measured, alone or beside others? Fresh processes, shown while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.case_study.results import Settings
from benchmarks.unet3d import brats, synthetic
from benchmarks.unet3d.console import ProgressView
from benchmarks.unet3d.preprocess import prepare_cube
from benchmarks.unet3d.run import Configuration, Run
from benchmarks.unet3d.study import MAX_SUBJECTS, Failure, OnEvent, RunFailed, run_fresh
from lmswap.hardware.ram import read_ram

MADE_SUBJECTS = 12  # where no data is given: enough for a table of boxes
# Policy auto plans again before the fourth step if the third showed that a new plan may not be the best.
WARM_UP_STEPS = 4
# With others the first step captures and compiles, and the second finds the memory of the first.
OTHER_WARM_UP_STEPS = 2


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


class Trial(NamedTuple):
    """What is to be run, and where what comes of it goes."""

    configuration: Configuration
    runs: list[Run]
    failures: list[Failure]


class Turns:
    """Whose timed step is next? Those whose last one is longest ago, once all have warmed up."""

    def __init__(self, count: int) -> None:
        self._count, self._changed = count, threading.Condition()
        self._warm: set[int] = set()
        self._waiting: list[int] = []
        self._running: int | None = None

    def take(self, number: int) -> None:
        """``number`` has warmed up, or taken its step, and waits for its turn."""
        with self._changed:
            self._warm.add(number)
            self._waiting.append(number)
            self._leave(number)
            self._changed.wait_for(lambda: self._is_due(number))
            self._waiting.pop(0)
            self._running = number

    def end(self, number: int) -> None:
        """``number`` takes part no longer."""
        with self._changed:
            self._count -= 1
            self._warm.discard(number)
            self._leave(number)

    def _leave(self, number: int) -> None:
        if self._running == number:
            self._running = None
        self._changed.notify_all()

    def _is_due(self, number: int) -> bool:
        return self._running is None and self._waiting[0] == number and len(self._warm) == self._count


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

    def configuration(
        self, size: int, policy: str | None, *, is_planned: bool = False, **changes: Any
    ) -> Configuration:
        """One training of ``size`` by ``policy``, without a budget unless ``changes`` give one.

        ``is_planned`` says that the same was trained before: its plan comes from the cache and is the last one.
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
        """Runs one configuration; what comes of it goes to ``runs`` or ``failures``."""
        with ProgressView(self.console) as view:
            run = partial(run_fresh, configuration, self._folder / "logs", view.on_event)
            return self._keep(Trial(configuration, runs, failures), run)

    def attempt_in_turns(self, trials: Sequence[Trial], needed_bytes: int) -> None:
        """Runs what is to be compared in processes that take their timed steps in turn: all see the same minutes.

        That is for a CPU, whose speed changes with what its neighbours do. On a GPU, and where there are no
        ``needed_bytes`` for all of them at once, they run one after another.
        """
        if self.settings.device != "cpu" or needed_bytes > read_ram().available_bytes:
            for trial in trials:
                self.attempt(trial.configuration, trial.runs, trial.failures)
            return
        turns = Turns(len(trials))

        def run(number: int, on_event: OnEvent, is_ready: threading.Event) -> Run:
            def take_turn() -> None:
                is_ready.set()
                turns.take(number)

            configuration = replace(trials[number].configuration, takes_turns=True)
            logs = self._folder / "logs" / f"turn-{number}"
            try:
                return run_fresh(configuration, logs, on_event, when_ready=take_turn)
            finally:
                turns.end(number)

        with ProgressView(self.console) as view, ThreadPoolExecutor(len(trials)) as pool:
            submit = partial(pool.submit, run)
            futures = list(_one_by_one(len(trials), lambda number, ready: submit(number, view.on_event, ready)))
            wait(futures)
        for trial, future in zip(trials, futures, strict=True):
            self._keep(trial, future.result)

    def run_together(
        self, configurations: Sequence[Configuration], environments: Sequence[Mapping[str, str]]
    ) -> tuple[Run, ...]:
        """Lets all of them train at once; they warm up one by one, so that no plan is made from times beside others.

        Raises:
            RunFailed: one did not finish, so the others did not compete with it; they are ended.
        """
        barrier = threading.Barrier(len(configurations))
        futures: list[Future[Run]] = []
        with ProgressView(self.console) as view, ThreadPoolExecutor(len(configurations)) as pool:

            def begin(number: int, is_ready: threading.Event) -> Future[Run]:
                def meet() -> None:
                    is_ready.set()
                    barrier.wait()

                logs, environment = self._folder / "logs" / f"replica-{number}", environments[number]
                future = pool.submit(
                    run_fresh, configurations[number], logs, view.on_event, when_ready=meet, environment=environment
                )
                future.add_done_callback(lambda done: barrier.abort() if done.exception() else None)
                return future

            for future in _one_by_one(len(configurations), begin):
                futures.append(future)
                if future.done():
                    break
            wait(futures)
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return tuple(future.result() for future in futures)

    def _keep(self, trial: Trial, run: Callable[[], Run]) -> Run | None:
        try:
            trial.runs.append(run())
        except RunFailed as failure:
            trial.failures.append(Failure(trial.configuration, str(failure)))
            self.console.print(f"[red]{trial.configuration.name} did not finish:[/] {failure}", highlight=False)
            return None
        return trial.runs[-1]


def _one_by_one(count: int, begin: Callable[[int, threading.Event], Future[Run]]) -> Iterator[Future[Run]]:
    """Begins trainings by number, each when the one before has set its event, as ready, or has ended."""
    for number in range(count):
        is_ready = threading.Event()
        future = begin(number, is_ready)
        while not (is_ready.wait(0.1) or future.done()):
            pass
        yield future
