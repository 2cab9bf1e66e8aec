"""Reader and writer of lmswap's own trace files: JSON, written by the profiled process and read back equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmswap.errors import TraceError
from lmswap.ir.json_io import from_fields
from lmswap.profiling.trace import Trace

SCHEMA = "lmswap.trace/1"


def write_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Write ``traces`` to ``path``; times in seconds, sizes in bytes."""
    path.write_text(json.dumps({"schema": SCHEMA, "traces": [asdict(trace) for trace in traces]}), encoding="utf-8")


def read(data: Mapping[str, Any]) -> tuple[Trace, ...]:
    """Read what `write_traces` wrote, parsed as JSON.

    Raises:
        TraceError: it has another schema.
    """
    if data.get("schema") != SCHEMA:
        raise TraceError(f"not a trace file of this version: expected schema '{SCHEMA}', found {data.get('schema')!r}")
    return tuple(from_fields(Trace, record) for record in data["traces"])
