"""Timelines in the trace event format of Chrome, which Perfetto opens (ui.perfetto.dev).

Each timeline is a process, each lane a thread, resident memory a counter track; where a timeline covers several steps,
they are a thread of their own. Times are microseconds.
The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.reporting.output_file import check_can_write


def write_chrome_trace(path: Path, timelines: Sequence[Timeline], *, about: Mapping[str, str | int]) -> None:
    """Write ``timelines`` to ``path`` as one trace; ``about`` is stored in it as metadata.

    Raises:
        OptionError: the folder does not exist.
    """
    check_can_write(path)
    events = [event for pid, timeline in enumerate(timelines, start=1) for event in _events(pid, timeline)]
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**about, "writer": "lmswap"},
    }
    path.write_text(json.dumps(trace), encoding="utf-8")


def _events(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, 0, "process_name", name=timeline.source)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    if timeline.steps:
        yield _metadata(pid, 0, "thread_name", name="step")
    for step in timeline.steps:
        yield _slice(pid, 0, f"step {step.number}", "step", step)
    rows = [row for lane in timeline.lanes for row in _rows(timeline, lane)]
    for tid, (name, spans) in enumerate(rows, start=1):
        yield _metadata(pid, tid, "thread_name", name=name)
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
        yield from (_slice(pid, tid, span.name, span.lane, span, **_arguments(span)) for span in spans)
    for seconds, nbytes in timeline.memory:
        yield {"ph": "C", "name": "memory", "pid": pid, "ts": seconds * 1e6, "args": {"resident bytes": nbytes}}


def _rows(timeline: Timeline, lane: Lane) -> list[tuple[str, list[Span]]]:
    """Return a lane's spans as rows: a thread's slices must not overlap, but a disk serves several copies at once."""
    rows: list[list[Span]] = [[]]
    for span in sorted((span for span in timeline.spans if span.lane is lane), key=lambda span: span.start_seconds):
        free = (row for row in rows if not row or row[-1].end_seconds <= span.start_seconds)
        row = next(free, None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return [(str(lane) if number == 1 else f"{lane} {number}", row) for number, row in enumerate(rows, start=1)]


def _arguments(span: Span) -> dict[str, int]:
    args: dict[str, int] = {}
    if span.nbytes:
        args["bytes"] = span.nbytes
        if span.seconds > 0:
            args["bytes_per_second"] = round(span.nbytes / span.seconds)
    if span.buffer is not None:
        args["buffer"] = span.buffer
    return args


def _slice(pid: int, tid: int, name: str, kind: str, what: Span | Step, **args: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": str(kind),
        "pid": pid,
        "tid": tid,
        "ts": what.start_seconds * 1e6,
        "dur": (what.end_seconds - what.start_seconds) * 1e6,
        "args": args,
    }


def _metadata(pid: int, tid: int, kind: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
