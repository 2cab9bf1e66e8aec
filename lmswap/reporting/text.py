"""Text output of figures and tables: identical wherever it is printed."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table

from lmswap.terminal import escape_controls

WIDTH = 80  # fits a terminal of default size


def render_text(*parts: RenderableType) -> str:
    """Render tables and sentences one below the other as plain text, without colours or trailing spaces.

    Control characters are escaped.
    """
    file = io.StringIO()
    # A width and no terminal: the text is the same in a log, a file and a test.
    console = Console(file=file, width=WIDTH, color_system=None, force_terminal=False)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return escape_controls("\n".join(line.rstrip() for line in file.getvalue().removesuffix("\n").split("\n")))


def render_html(*parts: RenderableType) -> str:
    """Render the same as HTML for a notebook's cell, with bold words and colours."""
    console = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.25">{code}</pre>')


class Printable:
    """Base of results that print as text, and show as HTML in a notebook."""

    def __rich__(self) -> RenderableType:
        """Return the result's parts, for `rich.print`."""
        raise NotImplementedError

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)


def figure_table(*headings: str, gap: int = 2) -> Table:
    """Return an empty table of figures: names in the first column, numbers to the right in the others."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    return table


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits: 0.0123 -> "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        value = seconds / scale
        if abs(value) >= 0.9995:
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.0f} ns"


def format_error(predicted: float | None, measured: float | None) -> str:
    """Format a prediction's error, in percent of the measurement; "–" where undefined."""
    if predicted is None or not measured:
        return "–"
    percent = round(100 * (predicted - measured) / measured, 1)
    return f"{percent:+.1f} %" if percent else "0.0 %"


def format_longer(seconds: float | None, free_seconds: float | None) -> str:
    """Format by which share a step exceeds one in unlimited memory, "3.0 %"; "" if unknown."""
    if not free_seconds or seconds is None:
        return ""
    return f"{100 * max(0.0, seconds / free_seconds - 1):.1f} %"


def format_excess(excess: float | None) -> str:
    """Format a plan's optimality gap, `Plan.excess`: 0.03 -> "at most 3.0 % above the best possible"."""
    if excess is None:
        return "its optimality gap is unknown"
    return f"at most {100 * excess:.1f} % above the best possible for this order of operations"


def print_result(text: str, file: TextIO | None = None) -> None:
    """Print a command's result, on standard output unless ``file`` is given, and flush.

    Control characters, and characters outside the output's encoding, are escaped: names in files may contain any.
    """
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(escape_controls(text).encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
