"""Access to nsys' and nvprof's SQLite files, whose tables exist only if they have rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from lmswap.errors import TraceError


class Tables:
    """A profiler's SQLite file, whose tables and columns differ between versions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def rows(self, table: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Return the rows of ``table``, none if it is missing; ``optional`` columns follow, None where it lacks them.

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
        """Return two columns of ``table`` as a dictionary, empty if the table is missing."""
        return {row[0]: row[1] for row in self.rows(table, (key, value))}
