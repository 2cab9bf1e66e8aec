"""Reader and writer of lmswap's own trace files: JSON, written by the profiled process and read back equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.profiling.trace import Stall, Trace

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
    return tuple(_trace(record) for record in data["traces"])


def _trace(record: Mapping[str, Any]) -> Trace:
    timeline = record["timeline"]
    return Trace(
        tool=str(record["tool"]),
        device=str(record["device"]),
        timeline=Timeline(
            str(timeline["source"]),
            tuple(_span(span) for span in timeline["spans"]),
            tuple((float(seconds), int(nbytes)) for seconds, nbytes in timeline["memory"]),
            tuple(
                Step(int(s["number"]), float(s["start_seconds"]), float(s["end_seconds"])) for s in timeline["steps"]
            ),
        ),
        stalls=tuple(_stall(stall) for stall in record["stalls"]),
        notes=tuple(str(note) for note in record["notes"]),
        emulated_link=str(record["emulated_link"]),
    )


def _span(record: Mapping[str, Any]) -> Span:
    return Span(
        lane=Lane(record["lane"]),
        name=str(record["name"]),
        start_seconds=float(record["start_seconds"]),
        end_seconds=float(record["end_seconds"]),
        nbytes=int(record["nbytes"]),
        buffer=None if record["buffer"] is None else int(record["buffer"]),
        is_pageable=bool(record["is_pageable"]),
    )


def _stall(record: Mapping[str, Any]) -> Stall:
    return Stall(
        op=str(record["op"]),
        source=str(record["source"]),
        buffer=str(record["buffer"]),
        lane=Lane(record["lane"]),
        num=int(record["num"]),
        seconds=float(record["seconds"]),
    )
