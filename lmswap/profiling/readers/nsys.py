"""Reader of nsys' SQLite files: kernels, copies and NVTX ranges, in nanoseconds.

The format: "SQLite Export Schema Reference" of Nsight Systems. Tables exist only if they have rows, and older versions
have no table that names the kinds of memory.
"""

from __future__ import annotations

from lmswap.profiling.readers.raw import RawTrace
from lmswap.profiling.readers.tables import Tables
from lmswap.profiling.trace import Trace

# ENUM_CUDA_MEM_KIND of all versions seen; CUPTI, and so nvprof, has other numbers.
_PAGEABLE = 0


def read(tables: Tables) -> tuple[Trace, ...]:
    """Read an open file.

    Raises:
        TraceError: a table lacks a column.
    """
    strings = tables.mapping("StringIds", "id", "value")
    raw = RawTrace("nsys", device_names=_device_names(tables))
    kernels = tables.rows("CUPTI_ACTIVITY_KIND_KERNEL", ("start", "end", "shortName"), ("deviceId",))
    for start, end, name, device in kernels:
        raw.kernel(int(device or 0), str(strings.get(name, "kernel")), int(start), int(end))
    _read_copies(tables, raw)
    for start, end, text, text_id in tables.rows("NVTX_EVENTS", ("start", "end", "text"), ("textId",)):
        name = text if text is not None else strings.get(text_id)
        if name is not None and end is not None:
            raw.range(str(name), int(start), int(end))
    if next(tables.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ("start",)), None):
        raw.notes.append(
            "CUDA graphs were traced whole, their kernels are not seen: record with --cuda-graph-trace=node"
        )
    return raw.traces()


def _read_copies(tables: Tables, raw: RawTrace) -> None:
    pageable = {
        kind for kind, label in tables.mapping("ENUM_CUDA_MEM_KIND", "id", "label").items() if label == "Pageable"
    } or {_PAGEABLE}
    columns, optional = ("start", "end", "bytes", "copyKind"), ("srcKind", "dstKind", "deviceId")
    raw.copies(tables.rows("CUPTI_ACTIVITY_KIND_MEMCPY", columns, optional), pageable)


def _device_names(tables: Tables) -> dict[int, str]:
    """Return names by CUDA's number, which is ``cuDevice`` in files that also have the machine's own."""
    return {
        cuda if cuda is not None else number: f"GPU {cuda if cuda is not None else number}: {name}"
        for number, name, cuda in tables.rows("TARGET_INFO_GPU", ("id", "name"), ("cuDevice",))
    }
