"""What do all displays of progress share? Bars in the terminal while a block runs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn


class Bars:
    """Bars with a description of ``width`` characters, and ``columns`` behind how much of each is done."""

    def __init__(self, console: Console, width: int, *columns: ProgressColumn) -> None:
        description = TextColumn(f"{{task.description:<{width}}}")
        self._progress = Progress(description, BarColumn(bar_width=8), MofNCompleteColumn(), *columns, console=console)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
