"""Where do benchmarks print? On a console that takes any text, whatever characters the output has."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def make_console() -> Console:
    """A console on standard output; characters that it cannot have, as ``³`` under ``LC_ALL=C``, are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console()
