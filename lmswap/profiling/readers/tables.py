"""What do nsys' and nvprof's SQLite files have in common? Tables that are there only if something fills them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from lmswap.errors import TraceError


class Tables:
    """An SQLite file of a profiler, whose tables and columns differ between versions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def rows(self, table: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of ``table``, empty if it is missing; ``optional`` columns follow, None where it lacks them.

        Raises:
            TraceError: the table lacks one of ``columns``.
        """
        if table not in self.names:
            return iter(())
        have = {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}
        missing = [column for column in columns if column not in have]
        if missing:
            raise TraceError(f"its table {table} has no column {', '.join(missing)}")
        chosen = [f'"{column}"' if column in have else "NULL" for column in (*columns, *optional)]
        return self._connection.execute(f'SELECT {", ".join(chosen)} FROM "{table}"')

    def mapping(self, table: str, key: str, value: str) -> dict[Any, Any]:
        """Two columns of ``table`` as a dictionary, empty if the table is missing."""
        return {row[0]: row[1] for row in self.rows(table, (key, value))}
