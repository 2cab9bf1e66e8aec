"""Ends a process with all that it started, by its session, to which they belong."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


@contextmanager
def in_session(command: Sequence[str], output: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """Starts ``command`` in a session of its own; whatever ends the block, nothing of the session runs after it.

    What a lost terminal and `timeout` send raises `KeyboardInterrupt` inside, as Ctrl-C does.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield child
    finally:
        while left := [*_members(child.pid)]:  # until all have heard of it: one may have started others meanwhile
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _members(session: int) -> Iterator[int]:
    """The processes of a session that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_session) == session and state != "Z":
                yield int(stat.parent.name)
