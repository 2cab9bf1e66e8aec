"""How figures and tables are written as text: the same text wherever it is printed, wide enough for a log."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from rich.console import Console, RenderableType

from lmswap.terminal import escape_controls

WIDTH = 120
TERMINAL_WIDTH = 80  # of what people read most: a terminal as it opens shows it whole


def render_text(*parts: RenderableType, width: int = WIDTH) -> str:
    """Renders tables and sentences one below the other as plain text, without colours or trailing spaces.

    Control characters are escaped.
    """
    file = io.StringIO()
    # A width and no terminal: the text is the same in a log, a file and a test.
    console = Console(file=file, width=width, color_system=None, force_terminal=False)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return escape_controls("\n".join(line.rstrip() for line in file.getvalue().removesuffix("\n").split("\n")))


def render_html(*parts: RenderableType, width: int = WIDTH) -> str:
    """The same for a notebook's cell, with its bold words and colours."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.25">{code}</pre>')


def format_seconds(seconds: float) -> str:
    """Writes a duration with three digits: 0.0123 -> "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        value = seconds / scale
        if abs(value) >= 0.9995:
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.0f} ns"


def format_error(predicted: float | None, measured: float | None) -> str:
    """Writes how far a prediction is off, in percent of the measurement; "–" where none can be said."""
    if predicted is None or not measured:
        return "–"
    percent = round(100 * (predicted - measured) / measured, 1)
    return f"{percent:+.1f} %" if percent else "0.0 %"


def format_longer(seconds: float | None, free_seconds: float | None) -> str:
    """Writes by which share a step exceeds one in unlimited memory, "3.0 %"; "" if it is not known."""
    if not free_seconds or seconds is None:
        return ""
    return f"{100 * max(0.0, seconds / free_seconds - 1):.1f} %"


def format_excess(excess: float | None) -> str:
    """Writes how good a plan is, from its `Plan.excess`: 0.03 -> "at most 3.0 % above the best possible"."""
    if excess is None:
        return "how fast it could be is not known"
    return f"at most {100 * excess:.1f} % above the best possible for this order of operations"


def print_result(text: str, file: TextIO | None = None) -> None:
    """Prints what a command found, on standard output unless ``file`` is given, and at once.

    Control characters, and what the output's encoding does not have, are escaped: names in files may be anything.
    """
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(escape_controls(text).encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
