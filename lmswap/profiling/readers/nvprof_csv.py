"""Reader of nvprof's table of GPU activities (--print-gpu-trace --csv), whose rows have varying units.

The first lines are remarks ("==123== …"); a header follows, then a row of units, which differ between files and
columns, then the activities, with copies named "[CUDA memcpy HtoD]". Columns differ between versions: they are found by
name. There are no ranges, so all of it is one step.
"""

from __future__ import annotations

import csv
import io

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane
from lmswap.profiling.readers.raw import RawTrace
from lmswap.profiling.trace import Trace

_NANOSECONDS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
_BYTES: dict[str, float] = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}  # nvprof's units are binary
_COPIES = {
    "[CUDA memcpy HtoD]": Lane.IN,
    "[CUDA memcpy HtoA]": Lane.IN,
    "[CUDA memcpy DtoH]": Lane.OUT,
    "[CUDA memcpy AtoH]": Lane.OUT,
}
_NEEDED = ("Start", "Duration", "Size", "Device", "Name")


def has_format(text: str) -> bool:
    """Return whether ``text`` has this format."""
    return any(line.startswith('"Start","Duration"') for line in text.splitlines()[:100])


def read(text: str) -> tuple[Trace, ...]:
    """Read a file's text.

    Raises:
        TraceError: a column or a unit is missing or unknown, or a row is truncated.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]
    first = next(number for number, line in enumerate(lines) if line.startswith('"Start","Duration"'))
    rows = csv.reader(io.StringIO("\n".join(lines[first:])))
    header = next(rows)
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise TraceError(f"it has no column {', '.join(missing)}: record with --print-gpu-trace")
    units = dict(zip(header, next(rows, []), strict=False))
    raw = RawTrace("nvprof", ["the memory kind of copies is missing: old nvprof"] * ("SrcMemType" not in header))
    devices: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise TraceError(f"activity {number} has {len(row)} of {len(header)} columns: the file is truncated")
        values = dict(zip(header, row, strict=True))
        start = _scaled(values, units, "Start", _NANOSECONDS)
        end = start + _scaled(values, units, "Duration", _NANOSECONDS)
        device = devices.setdefault(values["Device"], len(devices))
        raw.device_names[device] = values["Device"]
        lane = _COPIES.get(values["Name"])
        if lane is not None:
            host = values.get("SrcMemType" if lane is Lane.IN else "DstMemType", "")
            nbytes = _scaled(values, units, "Size", _BYTES)
            raw.copy(device, lane, start, end, nbytes, is_pageable=host == "Pageable")
        elif not values["Name"].startswith("[CUDA "):
            raw.kernel(device, values["Name"], start, end)
    return raw.traces()


def _scaled(values: dict[str, str], units: dict[str, str], column: str, known: dict[str, float]) -> int:
    unit = units.get(column, "")
    if unit not in known:
        raise TraceError(f"column {column} has the unit {unit!r}, which is none of {', '.join(known)}")
    try:
        return round(float(values[column]) * known[unit])
    except (ValueError, OverflowError):
        raise TraceError(f"{values[column]!r} in column {column} is no number") from None
