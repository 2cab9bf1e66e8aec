"""What is a person told who waits? What takes so long, once it has taken some seconds, and how long it took."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lmswap.terminal import escape_controls

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 3.0


@contextmanager
def told(what: str) -> Iterator[None]:
    """Says on standard error that ``what`` is done, if it takes longer than one waits without wondering; logs it.

    Of the ranks on a machine only the first one says so.
    """
    _log.info("%s", what)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    started, is_said = time.monotonic(), threading.Event()

    def say() -> None:
        is_said.set()
        _write(f"{what} ...")

    timer = threading.Timer(_PATIENCE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_said.is_set():
            _write(f"{what}: {time.monotonic() - started:.0f} s")


def _write(sentence: str) -> None:
    sys.stderr.write(f"lmswap: {escape_controls(sentence)}\n")
    sys.stderr.flush()
