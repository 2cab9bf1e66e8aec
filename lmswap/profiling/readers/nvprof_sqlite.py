"""Reader of nvprof's SQLite files (nvprof -o FILE): CUPTI's records, in nanoseconds.

The format: CUPTI's activity records, a table for each kind (cupti_activity.h); names are rows of StringTable.
"""

from __future__ import annotations

from lmswap.profiling.readers.raw import RawTrace
from lmswap.profiling.readers.tables import Tables
from lmswap.profiling.trace import Trace

_PAGEABLE = 1  # CUpti_ActivityMemoryKind
_MARKER_START, _MARKER_END = 2, 4  # CUpti_ActivityFlag, bits
# Kernels are in the second table if they ran one after another.
_KERNEL_TABLES = ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", "CUPTI_ACTIVITY_KIND_KERNEL")


def read(tables: Tables) -> tuple[Trace, ...]:
    """Read an open file.

    Raises:
        TraceError: a table lacks a column.
    """
    strings = tables.mapping("StringTable", "_id_", "value")
    raw = RawTrace("nvprof")
    for number, name in tables.rows("CUPTI_ACTIVITY_KIND_DEVICE", ("id", "name")):
        raw.device_names[int(number)] = f"GPU {number}: {strings.get(name, name)}"
    for table in _KERNEL_TABLES:
        for start, end, name, device in tables.rows(table, ("start", "end", "name", "deviceId")):
            raw.kernel(int(device), str(strings.get(name, "kernel")), int(start), int(end))
    columns = ("start", "end", "bytes", "copyKind", "srcKind", "dstKind", "deviceId")
    raw.copies(tables.rows("CUPTI_ACTIVITY_KIND_MEMCPY", columns), {_PAGEABLE})
    _read_ranges(tables, raw, strings)
    return raw.traces()


def _read_ranges(tables: Tables, raw: RawTrace, strings: dict[int, str]) -> None:
    """Read ranges, each two markers of one id, of which only the first has a name."""
    begun: dict[int, tuple[str, int]] = {}
    rows = tables.rows("CUPTI_ACTIVITY_KIND_MARKER", ("timestamp", "flags", "id", "name"))
    for timestamp, flags, number, name in sorted(rows, key=lambda row: int(row[0])):
        if flags & _MARKER_START:
            begun[number] = (str(strings.get(name, "")), timestamp)
        elif flags & _MARKER_END and number in begun:
            text, start = begun.pop(number)
            raw.range(text, start, timestamp)
