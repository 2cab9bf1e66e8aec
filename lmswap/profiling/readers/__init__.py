"""Reads profilers' files: the content determines the format, and one reader per format returns traces."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from lmswap.errors import TraceError, without_path
from lmswap.files import open_file, read_text
from lmswap.profiling.readers import kineto, nsys, nvprof_csv, nvprof_sqlite, own
from lmswap.profiling.readers.tables import Tables
from lmswap.profiling.trace import Trace

_KNOWN = "a trace of Kineto (JSON), nsys (SQLite), nvprof (SQLite or CSV) or lmswap"
# Raised by truncated files, and by fields of another type than their format's.
_DAMAGE = (
    *(sqlite3.Error, csv.Error, RecursionError),
    *(LookupError, TypeError, AttributeError, ValueError, ArithmeticError),
)


def read_traces(path: str | Path) -> tuple[Trace, ...]:
    """Read a profiler's file: one trace per device, whatever the file's name.

    Raises:
        TraceError: the file cannot be read, is of no known format, is damaged, or has no activity of any device.
    """
    try:
        traces = _read(Path(path))
    except OSError as error:
        raise TraceError(f"cannot read '{path}': {without_path(error)}") from error
    except TraceError as error:
        raise TraceError(f"'{path}' cannot be used: {error}") from error
    except _DAMAGE as error:
        raise TraceError(f"'{path}' is damaged: {type(error).__name__} {error}") from error
    if not traces:
        raise TraceError(
            f"'{path}' has neither kernels nor copies in it: nothing ran on a device while it was recorded"
        )
    return traces


def _read(path: Path) -> tuple[Trace, ...]:
    with open_file(path) as file:
        head = file.read(2**16)
    if head.startswith(b"SQLite format 3\0"):
        _check_length(path, head)
        return _read_tables(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"it is a report of nsys; 'nsys export --type sqlite {path}' converts it to a readable file")
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return _read_json(text)
    if nvprof_csv.has_format(text):
        return nvprof_csv.read(text)
    raise TraceError(f"it is not {_KNOWN}")


def _check_length(path: Path, head: bytes) -> None:
    """Check the length in the header (sqlite.org/fileformat.html): SQLite itself fails only at a missing page."""
    page_bytes = int.from_bytes(head[16:18])
    nbytes = int.from_bytes(head[28:32]) * (2**16 if page_bytes == 1 else page_bytes)
    if path.stat().st_size < nbytes:
        raise TraceError(f"it is truncated: {path.stat().st_size} of {nbytes} bytes")


def _read_json(text: str) -> tuple[Trace, ...]:
    data: Any = json.loads(text)
    if "traceEvents" in data:
        return kineto.read(data)
    if "schema" in data:
        return own.read(data)
    raise TraceError(f"it is not {_KNOWN}")


def _read_tables(path: Path) -> tuple[Trace, ...]:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        tables = Tables(connection)
        if "StringTable" in tables.names:
            return nvprof_sqlite.read(tables)
        if "StringIds" in tables.names:
            return nsys.read(tables)
    raise TraceError(f"it is an SQLite file, but not {_KNOWN}: it has neither nsys' nor nvprof's table of strings")
