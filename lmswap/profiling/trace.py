"""A trace: one tool's timeline of some steps on one device, with the stalls where they are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane, Span, Step, Timeline


@dataclass(frozen=True, slots=True)
class Stall:
    """The waits of one op for one buffer, over all steps of a trace.

    ``lane`` is the copy's: IN, for the bytes that the op reads; OUT, for the memory that the buffer releases.
    """

    op: str
    source: str  # the user's source line, "" where unknown
    buffer: str
    lane: Lane
    num: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """One device as recorded by one tool; ``tool`` and ``device`` are display names. ``notes``: what is not in it.

    ``emulated_link`` is the rate to which lmswap paced its copies, "" at the machine's own speed or if unknown.
    """

    tool: str
    device: str
    timeline: Timeline
    stalls: tuple[Stall, ...] = ()  # longest first
    notes: tuple[str, ...] = ()
    emulated_link: str = ""

    def steps_between(self, first: int, stop: int) -> Trace:
        """Return the steps numbered [first, stop), with times from the start of the first one.

        Stalls remain those of all steps, with a note: only the recorder could assign them to steps.

        Raises:
            TraceError: the trace does not have all of these steps.
        """
        steps = self.timeline.steps
        chosen = tuple(step for step in steps if first <= step.number < stop)
        if len(chosen) < stop - first:
            have = f"steps {steps[0].number} to {steps[-1].number}" if steps else "no steps: no ranges mark them"
            raise TraceError(f"{self.tool} has {have}, so steps {first} to {stop - 1} cannot be selected from it")
        notes = self.notes
        if self.stalls and len(chosen) < len(steps):
            notes += (f"the waits are those of all its {len(steps)} steps",)
        return replace(self, timeline=_cut(self.timeline, chosen), notes=notes)


def side_by_side(seen: Sequence[Trace], own: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return a tool's traces and lmswap's own of the same steps, as the columns of one profile.

    Under an emulated link a tool sees each copy as many short ones at the real link's speed with waits between them.
    There the copies of lmswap's record replace the tool's pinned ones.
    """
    emulated = {_device_number(trace.device): trace for trace in own if trace.emulated_link}
    columns = []
    for trace in seen:
        record = emulated.get(_device_number(trace.device))
        columns.append(trace if record is None else _with_copies_of(record, trace))
    return (*columns, *own)


def _with_copies_of(record: Trace, seen: Trace) -> Trace:
    kept = [span for span in seen.timeline.spans if span.lane is Lane.COMPUTE or span.is_pageable]
    copies = [span for span in record.timeline.spans if span.lane is not Lane.COMPUTE]
    spans = tuple(sorted([*kept, *copies], key=_start))
    note = f"copies and waits are those of {record.tool}, since the link was emulated; copies of batches are omitted"
    notes = (*seen.notes, note)
    timeline = replace(seen.timeline, spans=spans)
    return replace(seen, timeline=timeline, notes=notes, emulated_link=record.emulated_link)


def _device_number(device: str) -> str:
    """Return the same for "GPU 0: NVIDIA H200", a tool's name of a device, and "cuda:0 (NVIDIA H200)", lmswap's."""
    match = re.match(r"(?:GPU |cuda:)(\d+)", device)
    return match[1] if match else device


def make_timeline(source: str, spans: list[Span], steps: list[Step], memory: tuple[tuple[float, int], ...]) -> Timeline:
    """Return a timeline of spans at any clock: shifted to begin with its first step, and ordered by start.

    Spans outside all steps are omitted. Without steps it begins with the first span.
    """
    ordered = tuple(sorted(steps, key=lambda step: step.start_seconds))
    if ordered:
        return _cut(Timeline(source, tuple(spans), memory), ordered)
    origin = min((span.start_seconds for span in spans), default=0.0)
    return Timeline(source, tuple(span.shifted(-origin) for span in sorted(spans, key=_start)), memory)


def _cut(timeline: Timeline, steps: tuple[Step, ...]) -> Timeline:
    start, end = steps[0].start_seconds, steps[-1].end_seconds
    inside = [span for span in timeline.spans if span.start_seconds < end and span.end_seconds > start]
    return Timeline(
        timeline.source,
        tuple(span.shifted(-start) for span in sorted(inside, key=_start)),
        tuple((seconds - start, nbytes) for seconds, nbytes in timeline.memory if start <= seconds < end),
        tuple(Step(step.number, step.start_seconds - start, step.end_seconds - start) for step in steps),
    )


def _start(span: Span) -> float:
    return span.start_seconds
