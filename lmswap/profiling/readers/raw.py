"""Converts a profiler's rows to traces: nanoseconds and device numbers to one trace per device, cut to its steps.

In all formats, copies from host to device are IN, from device to host OUT; kernels are COMPUTE, except NCCL's, which
are NETWORK; other kinds of copies and fills are none of these (see `lmswap.profiling.figures`). Ranges named "lmswap
step N", "ProfilerStep#N", "step N", "iteration N" or "batch N" are steps; without a number they are counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane, Span, Step
from lmswap.profiling.trace import Trace, make_timeline

# The first kind with any match in a file is used.
_STEPS = (
    re.compile(r"lmswap step (\d+)"),
    re.compile(r"ProfilerStep#(\d+)"),
    re.compile(r"(?:training[ _])?(?:step|iteration|iter|batch)\b\D{0,3}(\d+)?", re.IGNORECASE),
)
_NO_STEPS = "no ranges mark the steps: all of it counts as one"
_FOREIGN_STEPS = "the steps are the host's: where it did not wait for the device, work counts to the step after"
_NO_KERNELS = "no kernel was recorded, so figures of compute are missing"

# "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclKernel_…" before NCCL 2.19; RCCL's have the same names.
_COLLECTIVE = re.compile(r"nccl(Dev)?Kernel")

# CUpti_ActivityMemcpyKind, in nsys too. Arrays on the device count as device.
_LANE_OF_KIND = {1: Lane.IN, 2: Lane.OUT, 3: Lane.IN, 4: Lane.OUT}


class _Row(NamedTuple):
    lane: Lane
    name: str
    start: int
    end: int
    nbytes: int = 0
    is_pageable: bool = False


@dataclass
class RawTrace:
    """Rows of one file, as found by its reader; times in integer nanoseconds of any clock."""

    tool: str
    notes: list[str] = field(default_factory=list)
    device_names: dict[int, str] = field(default_factory=dict)
    _rows: dict[int, list[_Row]] = field(default_factory=dict)  # by device
    _ranges: list[tuple[str, int, int]] = field(default_factory=list)

    def kernel(self, device: int, name: str, start: int, end: int) -> None:
        """Add a kernel."""
        self._add(device, _Row(Lane.NETWORK if _COLLECTIVE.match(name) else Lane.COMPUTE, name, start, end))

    def copy(self, device: int, lane: Lane, start: int, end: int, nbytes: int, *, is_pageable: bool) -> None:
        """Add a copy between host and device."""
        self._add(device, _Row(lane, f"copy {lane}", start, end, nbytes, is_pageable))

    def copies(self, rows: Iterable[tuple[Any, ...]], pageable: Container[int]) -> None:
        """Add CUPTI's copies: start, end, bytes, kind, memory kinds of source and target, device.

        ``pageable`` holds the kinds of pageable memory; copies within a device and between devices are omitted.
        """
        for start, end, nbytes, kind, source, target, device in rows:
            lane = _LANE_OF_KIND.get(kind)
            if lane is not None:
                is_pageable = (source if lane is Lane.IN else target) in pageable
                self.copy(int(device or 0), lane, int(start), int(end), int(nbytes), is_pageable=is_pageable)

    def range(self, name: str, start: int, end: int) -> None:
        """Add a named range of the host, which may be a step."""
        self._ranges.append((name, start, end))

    def traces(self) -> tuple[Trace, ...]:
        """Return one trace for each device with activity."""
        if not self._rows:
            return ()
        origin = min(row.start for rows in self._rows.values() for row in rows)  # large floats lose digits
        kind, found = self._steps()
        steps = [Step(number, (start - origin) * 1e-9, (end - origin) * 1e-9) for number, start, end in found]
        about_steps = {None: [_NO_STEPS], _STEPS[0]: []}.get(kind, [_FOREIGN_STEPS])
        return tuple(
            Trace(
                tool=self.tool,
                device=self.device_names.get(device, f"GPU {device}"),
                timeline=make_timeline(self.tool, _spans(rows, origin), steps, ()),
                notes=(*self.notes, *about_steps, *_missing(rows)),
            )
            for device, rows in sorted(self._rows.items())
        )

    def _add(self, device: int, row: _Row) -> None:
        if row.end < row.start or row.nbytes < 0:
            raise TraceError(
                f"'{row.name}' on device {device} runs from {row.start} to {row.end} ns with {row.nbytes} bytes"
            )
        self._rows.setdefault(device, []).append(row)

    def _steps(self) -> tuple[re.Pattern[str] | None, list[tuple[int, int, int]]]:
        """Return the pattern that marks the steps, and number, start and end of each."""
        for kind in _STEPS:
            found = [(kind.fullmatch(name), start, end) for name, start, end in self._ranges]
            rows = sorted((start, end, match[1]) for match, start, end in found if match)
            steps: dict[int, tuple[int, int]] = {}
            for order, (start, end, text) in enumerate(rows):
                number = order if text is None else int(text)
                known_start, known_end = steps.get(number, (start, end))  # several processes may share a step
                steps[number] = (min(start, known_start), max(end, known_end))
            if steps:
                return kind, [(number, start, end) for number, (start, end) in steps.items()]
        return None, []


def _spans(rows: list[_Row], origin: int) -> list[Span]:
    return [
        Span(
            row.lane,
            row.name,
            (row.start - origin) * 1e-9,
            (row.end - origin) * 1e-9,
            row.nbytes,
            is_pageable=row.is_pageable,
        )
        for row in rows
    ]


def _missing(rows: list[_Row]) -> list[str]:
    return [] if any(row.lane in (Lane.COMPUTE, Lane.NETWORK) for row in rows) else [_NO_KERNELS]
