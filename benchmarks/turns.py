"""Compares trainings on a machine whose speed changes: they step in turn, so that all run in the same minutes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.unheard import unheard

Given = TypeVar("Given", bound="OnDevice")
Found = TypeVar("Found")


class Training(Protocol):
    """A training that has warmed up in a process of its own and waits for its turn."""

    @property
    def has_ended(self) -> bool:
        """Whether it has finished or died."""

    def take_turn(self) -> None:
        """Run one step and wait for its end; nothing if it has ended."""


def take_turns(trainings: Sequence[Training]) -> None:
    """Run steps of all trainings in turn until all have ended; one computes at a time."""
    while not all(training.has_ended for training in trainings):
        for training in trainings:
            training.take_turn()


class OnDevice(Protocol):
    """What is trained: it names its device, "cpu" or "cuda"."""

    @property
    def device(self) -> str:
        """Its type."""


def train_in_turns(
    train: Callable[[Given, Callable[[], None]], Found],
    runs: Sequence[Given],
    died: Callable[[Given, str], Found],
    *,
    preload: Sequence[str],
) -> list[Found]:
    """Warm up one after another, each in a process of its own, then let each take one step after the other.

    One computes at a time. ``died`` makes the outcome of a run from what is known of its end; for the others see
    `FreshTraining`.
    """
    why = "the process was killed, perhaps for want of memory"
    trainings = [FreshTraining(train, run, died(run, why), device=run.device, preload=preload) for run in runs]
    take_turns(trainings)
    return [training.outcome for training in trainings if training.outcome is not None]


class FreshTraining(Generic[Given, Found]):
    """A training in a fresh process, which has imported what it needs but has run nothing, and waits for its turns."""

    def __init__(
        self,
        train: Callable[[Given, Callable[[], None]], Found],
        given: Given,
        died: Found,
        *,
        device: str,
        preload: Sequence[str],
    ) -> None:
        """Start the process and warm up.

        Args:
            train: called with ``given`` and a function that it calls before each step that is timed beside others'.
            given: what is trained.
            died: the outcome of a process that was killed.
            device: "cpu" or "cuda".
            preload: modules that the process has imported, on a CPU.
        """
        # What a fork finds imported is no memory of a step's; of CUDA, which counts its own, it could find too much.
        context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        self._died = died
        self.outcome: Found | None = None
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(train, given, theirs), daemon=True)
        if device == "cpu":
            context.set_forkserver_preload([*preload])
            with unheard():
                ensure_running()  # the server; a fork waits until it has imported all
            self._process.start()
        else:
            with unheard():
                self._process.start()
        theirs.close()  # so that its end is seen
        self._wait()
        self.take_turn()  # the warm-up

    @property
    def has_ended(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None

    def take_turn(self) -> None:
        """Run one step and wait for its end; no effect if the training has ended."""
        if self.outcome is None:
            self._pipe.send(None)
            self._wait()

    def _wait(self) -> None:
        try:
            self.outcome = self._pipe.recv()
        except (EOFError, ConnectionError):
            self.outcome = self._died
        if self.outcome is not None:
            self._process.join()
            self._pipe.close()


def _serve(train: Callable[[Any, Callable[[], None]], Any], given: Any, pipe: Connection) -> None:
    """Send None for each turn that the training waits for, the first one to warm up, and then the outcome.

    Once the process that has started it has ended, it ends, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once; who has started it says so

    def wait_for_turn() -> None:
        try:
            pipe.send(None)
            pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit()

    wait_for_turn()  # Ctrl-C may have ended the other one before this one was there
    outcome = train(given, wait_for_turn)
    with suppress(ConnectionError):
        pipe.send(outcome)
