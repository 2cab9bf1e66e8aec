"""Ctrl-C in process groups: a terminal sends it to all; the one that was started reports, and ends the others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, in the main thread, Ctrl-C is ignored, and so it is by processes started there until they ask for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
