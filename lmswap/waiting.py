"""What is a person told who waits? What is done, how far it is, and at the end what took how long.

A wait has stages, one within another or one after another. On a terminal one line says which is under way, from the
first second on; elsewhere, as in a log, a line says so now and then. Who waited for long gets one line at the end::

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
_LONG_SECONDS = 3.0  # who waited for less needs no account of it
_LEAST_SHARE = 0.05  # of a stage; before, what is left of it would be a guess


@contextmanager
def told(what: str, stage_name: str = "") -> Iterator[None]:
    """Says on standard error that ``what`` is done, if it takes longer than one waits without wondering; logs it.

    It begins with the stage ``stage_name``. Within another wait of this thread it is only that stage of the other one.
    Of the ranks on a machine only the first one says so.
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
    """A stage of the wait under way in this thread, if there is one: its seconds are not those of the stage around it.

    ``is_remembered`` says that the next process need not do it again.
    """
    return nullcontext() if _waits.open is None else _stage(_waits.open, name, is_remembered)


@contextmanager
def _stage(wait: _Wait, name: str, is_remembered: bool) -> Iterator[None]:
    around = wait.enter(name)
    try:
        yield
    finally:
        wait.leave(around, is_remembered=is_remembered)


def progress(count: int, total: int, share: float) -> None:
    """Of the stage under way ``count`` pieces of ``total`` are done, ``share`` of its work."""
    if _waits.open is not None:
        _waits.open.progress = (count, total, share)


class _Stage:
    def __init__(self, name: str) -> None:
        self.name, self.started = name, time.monotonic()


class _Wait:
    """One wait, and the thread that tells of it."""

    def __init__(self, what: str, stage_name: str) -> None:
        self._what, self._started, self._has_told = what, time.monotonic(), False
        self._stage = _Stage(stage_name)
        self._counted_from = self._started
        self._seconds: dict[str, float] = {}  # by stage
        self._remembered_seconds = 0.0
        self.progress: tuple[int, int, float] | None = None  # of the stage: done, of how many, the share of its work
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="lmswap wait", daemon=True)
        self._thread.start()

    def enter(self, name: str) -> _Stage:
        """Begins a stage; gives the one around it."""
        around = self._stage
        self._count()
        self._stage, self.progress = _Stage(name), None
        return around

    def leave(self, around: _Stage, *, is_remembered: bool) -> None:
        """Ends a stage."""
        self._count()
        if is_remembered:
            self._remembered_seconds += time.monotonic() - self._stage.started
        self._stage, self.progress = around, None

    def end(self) -> None:
        """It is over."""
        self._count()
        self._is_over.set()
        self._thread.join()
        seconds = time.monotonic() - self._started
        is_long = seconds >= _LONG_SECONDS
        if is_long or (self._has_told and _is_terminal()):
            _write(self._account(seconds) if is_long else "", is_whole=is_long)

    def _count(self) -> None:
        """Adds the seconds since the last call to the stage under way."""
        now = time.monotonic()
        self._seconds[self._stage.name] = self._seconds.get(self._stage.name, 0.0) + now - self._counted_from
        self._counted_from = now

    def _account(self, seconds: float) -> str:
        long = [f"{name} {taken:.0f}" for name, taken in self._seconds.items() if name and taken >= 0.5]
        parts = f" ({', '.join(long)})" if long else ""
        left = seconds - self._remembered_seconds
        again = f"; about {max(left, 1):.0f} s at the next start" if self._remembered_seconds >= 1 else ""
        return f"{self._what}: {seconds:.0f} s{parts}{again}"

    def _tell(self) -> None:
        waited_seconds = _PATIENCE_SECONDS
        while not self._is_over.wait(waited_seconds):
            self._has_told = True
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
        if share >= _LEAST_SHARE:
            left = f", about {max(1.0, (now - under_way.started) * (1 - share) / share):.0f} s left"
        return f"{self._what}{doing} {count}/{total}{left}"


class _Waits(threading.local):
    open: _Wait | None = None


_waits = _Waits()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _write(sentence: str, *, is_whole: bool) -> None:
    """Writes a line that stays, or one that the next takes the place of; nothing erases the latter."""
    line = escape_controls(f"lmswap: {sentence}" if sentence else "")
    if _is_terminal():
        width = shutil.get_terminal_size().columns - 1
        line = f"\r\x1b[K{line if is_whole else line[:width]}"
    if sys.stderr is not None:
        sys.stderr.write(line + ("\n" if is_whole else ""))
        sys.stderr.flush()
