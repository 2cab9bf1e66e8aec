"""Reports long waits on standard error: the activity, its progress, and at the end the seconds of each stage.

A wait has stages, nested or one after another. On a terminal one line shows the current stage, from the first second
on; elsewhere, as in a log, a line is written after 1, 10, 100 ... seconds. A long wait ends with a summary::

    lmswap: UNet, first step: timing ops 61/205, about 6 s left
    lmswap: UNet, first step: 9 s (tracing 4, timing ops 2, planning 1, compiling 1); about 6 s at the next start
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lmswap.terminal import escape_controls

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
_REDRAWN_SECONDS = 0.5  # on a terminal
_REPEATED_FACTOR = 10  # elsewhere: after 1, 10, 100 ... seconds
_LONG_SECONDS = 3.0  # shorter waits end without a summary
_MIN_SHARE = 0.05  # of a stage; before that, the seconds left would be a guess
_NO_STAGE = nullcontext()


@contextmanager
def reported(what: str, stage_name: str = "") -> Iterator[None]:
    """Report ``what`` on standard error if it takes longer than a second; log it in any case.

    It begins with the stage ``stage_name``. Within another wait of this thread it is a stage of that one. Of the ranks
    of a machine only the first one reports.
    """
    if _waits.open is not None:
        with stage(stage_name or what):
            yield
        return
    _log.info("%s", what)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    wait = _waits.open = _Wait(what, stage_name)
    try:
        yield
    finally:
        _waits.open = None
        wait.end()


def stage(name: str, *, is_remembered: bool = False) -> AbstractContextManager[None]:
    """Enter a stage of the current wait of this thread, if any; its seconds do not count for the enclosing stage.

    ``is_remembered``: its result is cached, and the next process does not need it.
    """
    return _NO_STAGE if _waits.open is None else _stage(_waits.open, name, is_remembered)


@contextmanager
def _stage(wait: _Wait, name: str, is_remembered: bool) -> Iterator[None]:
    around = wait.enter(name)
    try:
        yield
    finally:
        wait.leave(around, is_remembered=is_remembered)


def set_progress(count: int, total: int, share: float) -> None:
    """Set the progress of the current stage: ``count`` pieces of ``total``, ``share`` of its work."""
    if _waits.open is not None:
        _waits.open.progress = (count, total, share)


class _Stage:
    def __init__(self, name: str) -> None:
        self.name, self.started = name, time.monotonic()


class _Wait:
    """One wait, and the thread that reports it."""

    def __init__(self, what: str, stage_name: str) -> None:
        self._what, self._started, self._has_reported = what, time.monotonic(), False
        self._stage = _Stage(stage_name)
        self._counted_from = self._started
        self._seconds: dict[str, float] = {}  # by stage
        self._remembered_seconds = 0.0
        self.progress: tuple[int, int, float] | None = None  # of the stage: done, of how many, the share of its work
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="lmswap wait", daemon=True)
        self._thread.start()

    def enter(self, name: str) -> _Stage:
        """Begin a stage; return the enclosing one."""
        around = self._stage
        self._count()
        self._stage, self.progress = _Stage(name), None
        return around

    def leave(self, around: _Stage, *, is_remembered: bool) -> None:
        """End a stage; ``around`` is the enclosing one."""
        self._count()
        if is_remembered:
            self._remembered_seconds += time.monotonic() - self._stage.started
        self._stage, self.progress = around, None

    def end(self) -> None:
        """End the wait; print the summary if it was long."""
        self._count()
        self._has_ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._started
        is_long = seconds >= _LONG_SECONDS
        if is_long or (self._has_reported and _is_terminal()):
            _write(self._summary(seconds) if is_long else "", is_whole=is_long)

    def _count(self) -> None:
        """Add the seconds since the last call to the current stage."""
        now = time.monotonic()
        self._seconds[self._stage.name] = self._seconds.get(self._stage.name, 0.0) + now - self._counted_from
        self._counted_from = now

    def _summary(self, seconds: float) -> str:
        long = [f"{name} {taken:.0f}" for name, taken in self._seconds.items() if name and taken >= 0.5]
        parts = f" ({', '.join(long)})" if long else ""
        left = seconds - self._remembered_seconds
        again = f"; about {max(left, 1):.0f} s at the next start" if self._remembered_seconds >= 1 else ""
        return f"{self._what}: {seconds:.0f} s{parts}{again}"

    def _report(self) -> None:
        waited_seconds = _PATIENCE_SECONDS
        while not self._has_ended.wait(waited_seconds):
            self._has_reported = True
            is_terminal = _is_terminal()
            _write(self._now(), is_whole=not is_terminal)
            elapsed_seconds = time.monotonic() - self._started
            waited_seconds = _REDRAWN_SECONDS if is_terminal else (_REPEATED_FACTOR - 1) * elapsed_seconds

    def _now(self) -> str:
        under_way, progress = self._stage, self.progress
        now = time.monotonic()
        doing = f": {under_way.name}" if under_way.name else ""
        if progress is None:
            return f"{self._what}{doing} ... ({now - self._started:.0f} s)"
        count, total, share = progress
        left = ""
        if share >= _MIN_SHARE:
            left = f", about {max(1.0, (now - under_way.started) * (1 - share) / share):.0f} s left"
        return f"{self._what}{doing} {count}/{total}{left}"


class _Waits(threading.local):
    open: _Wait | None = None


_waits = _Waits()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _write(sentence: str, *, is_whole: bool) -> None:
    """Write a whole line, or one that the next line overwrites; an empty ``sentence`` erases the latter."""
    line = escape_controls(f"lmswap: {sentence}" if sentence else "")
    if _is_terminal():
        width = shutil.get_terminal_size().columns - 1
        line = f"\r\x1b[K{line if is_whole else line[:width]}"
    if sys.stderr is not None:
        sys.stderr.write(line + ("\n" if is_whole else ""))
        sys.stderr.flush()
