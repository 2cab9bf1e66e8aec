"""How do a profiler's rows become traces? Nanoseconds and devices by number → one trace per device, cut to its steps.

Whatever the format: copies from host to device go IN, from device to host OUT; kernels are COMPUTE; other kinds of
copies and fills are neither (see `lmswap.profiling.figures`). Ranges named "lmswap step N", "ProfilerStep#N", "step N",
"iteration N" or "batch N" are steps; where such names have no number, they are counted from 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane, Span, Step
from lmswap.profiling.trace import Trace, make_timeline

_OURS = re.compile(r"(?:lmswap step |ProfilerStep#)(\d+)")
_OTHERS = re.compile(r"(?:training[ _])?(?:step|iteration|iter|batch)\b\D{0,3}(\d+)?", re.IGNORECASE)

# CUpti_ActivityMemcpyKind, in nsys too. Arrays on the device count as device.
IN_KINDS = frozenset({1, 3})
OUT_KINDS = frozenset({2, 4})


@dataclass
class RawTrace:
    """Rows of one file as its reader finds them; times in integer nanoseconds of any clock."""

    tool: str
    notes: list[str] = field(default_factory=list)
    device_names: dict[int, str] = field(default_factory=dict)
    _spans: defaultdict[int, list[tuple[Lane, str, int, int, int, bool]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _ranges: list[tuple[str, int, int]] = field(default_factory=list)

    def kernel(self, device: int, name: str, start: int, end: int) -> None:
        """Adds a kernel."""
        self._add(device, (Lane.COMPUTE, name, start, end, 0, False))

    def copy(self, device: int, lane: Lane, start: int, end: int, nbytes: int, *, is_pageable: bool) -> None:
        """Adds a copy between host and device."""
        self._add(device, (lane, f"copy {lane}", start, end, nbytes, is_pageable))

    def range(self, name: str, start: int, end: int) -> None:
        """Adds a named range of the host, which may be a step."""
        self._ranges.append((name, start, end))

    def traces(self) -> tuple[Trace, ...]:
        """One trace for each device that something ran on."""
        if not self._spans:
            return ()
        origin = min(row[2] for rows in self._spans.values() for row in rows)  # of floats, too large ones lose digits
        steps = [Step(number, (start - origin) * 1e-9, (end - origin) * 1e-9) for number, start, end in self._steps()]
        notes = self.notes + ["no ranges mark the steps: all of it counts as one"] * (not steps)
        return tuple(
            Trace(
                tool=self.tool,
                device=self.device_names.get(device, f"GPU {device}"),
                timeline=make_timeline(
                    self.tool,
                    [
                        Span(lane, name, (start - origin) * 1e-9, (end - origin) * 1e-9, nbytes, is_pageable=pageable)
                        for lane, name, start, end, nbytes, pageable in rows
                    ],
                    steps,
                    (),
                ),
                notes=(*notes, *_missing(rows)),
            )
            for device, rows in sorted(self._spans.items())
        )

    def _add(self, device: int, row: tuple[Lane, str, int, int, int, bool]) -> None:
        if row[3] < row[2] or row[4] < 0:
            raise TraceError(f"'{row[1]}' on device {device} runs from {row[2]} to {row[3]} ns with {row[4]} bytes")
        self._spans[device].append(row)

    def _steps(self) -> list[tuple[int, int, int]]:
        for pattern in (_OURS, _OTHERS):
            found = [(pattern.fullmatch(name), start, end) for name, start, end in self._ranges]
            rows = sorted((start, end, match[1]) for match, start, end in found if match)
            steps: dict[int, tuple[int, int]] = {}
            for order, (start, end, text) in enumerate(rows):
                number = order if text is None else int(text)
                known_start, known_end = steps.get(number, (start, end))  # several processes may make a step together
                steps[number] = (min(start, known_start), max(end, known_end))
            if steps:
                return [(number, start, end) for number, (start, end) in steps.items()]
        return []


def _missing(rows: list[tuple[Lane, str, int, int, int, bool]]) -> list[str]:
    has_kernels = any(lane is Lane.COMPUTE for lane, *_ in rows)
    return [] if has_kernels else ["no kernel was recorded, so nothing is said of compute"]
