"""Progress displays: bars in a terminal while a block runs, lines in a log."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn


class Bars:
    """Bars with a description of ``width`` characters, and ``columns`` behind how much of each is done.

    Where the output is no terminal, bars would appear when all is over: `say` prints a line instead.
    """

    def __init__(self, console: Console, width: int, *columns: ProgressColumn) -> None:
        description = TextColumn(f"{{task.description:<{width}}}")
        self._console, self._is_log = console, not console.is_terminal
        shown = (description, BarColumn(bar_width=8), MofNCompleteColumn(), *columns)
        self._progress = Progress(*shown, console=console, disable=self._is_log)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Prints a line, at once, where there are no bars."""
        if self._is_log:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._console.file.flush()
