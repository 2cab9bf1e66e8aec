"""Runs a configuration in a process of its own: warm-up, then the timed steps, one by one or all at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import TextIO

from benchmarks.turns import take_turns
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.measured import Failure, Run
from benchmarks.unet3d.run import Event
from lmswap.hardware.host_memory import read_host_memory

_LOG_TAIL_LINES = 15

OnEvent = Callable[[Configuration, Event], None]


class RunFailed(Exception):
    """A run's process did not finish; the message says why and where its output is."""


class FreshRun:
    """A configuration in a process of its own, so that its peak and its crash are its own.

    ``child`` reports through ``events``, and waits for a line from ``start`` before it goes on.
    """

    def __init__(
        self, configuration: Configuration, on_event: OnEvent, child: subprocess.Popen[bytes], *, log: Path,
        events: TextIO, start: RawIOBase,
    ) -> None:  # fmt: skip
        self._configuration, self._on_event, self._child, self._log = configuration, on_event, child, log
        self._events, self._start = events, start
        self._last: Event = {}
        self.has_ended = False

    def warm_up(self) -> None:
        """Waits until it has warmed up, or ended."""
        self._read()

    def take_turn(self) -> None:
        """Lets it go on for a step, or to its end if it does not take turns; nothing if it has ended."""
        if self.has_ended:
            return
        with suppress(BrokenPipeError):  # it has died since; `finish` reports how
            self._start.write(b"start\n")
        self._read()

    def finish(self) -> Run:
        """Lets it train to its end.

        Raises:
            RunFailed: it did not finish.
        """
        while not self.has_ended:
            self.take_turn()
        match self._last:
            case {"event": "result", "run": run}:
                return Run.from_fields(run)
            case {"event": "failed", "message": message}:
                raise RunFailed(message)
        message = _explain_end(self._child.wait(), self._log)
        self._on_event(self._configuration, {"event": "failed", "message": message})
        raise RunFailed(message)

    def _read(self) -> None:
        for line in self._events:
            self._last = json.loads(line)
            self._on_event(self._configuration, self._last)
            if self._last["event"] == "ready":
                return
        self.has_ended = True


@contextmanager
def warmed_up(
    configuration: Configuration, logs: Path, on_event: OnEvent, environment: Mapping[str, str] | None = None
) -> Iterator[FreshRun]:
    """Start a run in a process of its own and wait until it has warmed up; it is killed at exit unless it has ended.

    Args:
        configuration: what is run.
        logs: the folder for its settings and its output.
        on_event: called with the configuration and each event of the process.
        environment: variables added to ours.

    Yields:
        The run, which waits to be continued by `take_turn` or `finish`; if it ended before, `finish` raises why.
    """
    logs.mkdir(parents=True, exist_ok=True)
    stem = logs / f"{configuration.size}-{configuration.kind}"
    settings, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    settings.write_text(json.dumps(asdict(configuration), indent=1))
    (events_end, child_events), (child_start, start_end) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", "benchmarks.unet3d.run", str(settings)]
    with os.fdopen(events_end) as events, os.fdopen(start_end, "wb", buffering=0) as start, log.open("wb") as output:
        try:
            child = subprocess.Popen(
                [*command, "--start", str(child_start), "--events", str(child_events)],
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[child_events, child_start],
                env={**os.environ, **(environment or {})},
            )
        finally:
            os.close(child_events)
            os.close(child_start)
        run = FreshRun(configuration, on_event, child, log=log, events=events, start=start)
        with child:
            try:
                run.warm_up()
                yield run
            finally:
                if not run.has_ended:
                    child.kill()


def run_fresh(configuration: Configuration, logs: Path, on_event: OnEvent) -> Run:
    """Runs a configuration in a process of its own.

    Raises:
        RunFailed: it did not finish.
    """
    with warmed_up(configuration, logs, on_event) as run:
        return run.finish()


def run_compared(
    configurations: Sequence[Configuration], logs: Path, on_event: OnEvent, needed_bytes: float
) -> list[Run | Failure]:
    """Run what is to be compared, each in a process of its own.

    Several take their timed steps in turn, so that all see the same minutes: that is for a CPU, whose speed changes
    with what its neighbours do. On a GPU they run one after another.

    Args:
        configurations: the runs.
        logs: the folder for settings and output.
        on_event: called with the configuration and each event of its process.
        needed_bytes: main memory for all at once; where less is available they run one after another.

    Returns:
        The run or the failure of each configuration, in order.
    """
    is_on_cpu = all(configuration.device == "cpu" for configuration in configurations)
    if len(configurations) == 1 or not is_on_cpu or needed_bytes > read_host_memory().available_bytes:
        return [_outcome(each, partial(run_fresh, each, logs, on_event)) for each in configurations]
    with ExitStack() as stack:
        begun: list[FreshRun] = []
        for number, configuration in enumerate(configurations):
            in_turn = replace(configuration, takes_turns=True)
            begun.append(stack.enter_context(warmed_up(in_turn, logs / f"turn-{number}", on_event)))
        take_turns(begun)
        return [_outcome(each, run.finish) for each, run in zip(configurations, begun, strict=True)]


def _outcome(configuration: Configuration, run: Callable[[], Run]) -> Run | Failure:
    try:
        return run()
    except RunFailed as failure:
        return Failure(configuration, str(failure))


def _explain_end(returncode: int, log: Path) -> str:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    if returncode == -signal.SIGKILL:
        return f"was killed, most likely because the machine ran out of memory; its output is in {log}"
    how = f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
    return f"ended with {how}; its output is in {log}" + (f", the end of it:\n{tail}" if tail else "")
