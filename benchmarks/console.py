"""The console of benchmarks; prints any text, whatever characters the output can encode."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lmswap.terminal import escape_controls


class _EscapingConsole(Console):
    """Escapes control characters in printed text; keeps its own, which move the cursor and set colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.is_control else segment._replace(text=escape_controls(segment.text))


def make_console() -> Console:
    """Return a console on standard output; control characters, and those it cannot encode, are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return _EscapingConsole()
