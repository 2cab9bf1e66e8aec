"""Reader of torch.profiler's traces: Kineto's events, in microseconds.

The format: pytorch/kineto, libkineto/src/output_json.cpp. Where nothing ran on a GPU, torch's own operators on the CPU
are read instead: the time in which at least one ran is compute; swaps are not seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane
from lmswap.profiling.readers.raw import RawTrace
from lmswap.profiling.trace import Trace

_COPY = re.compile(r"Memcpy (HtoD|DtoH) \((\w+) -> (\w+)\)")
_CPU = -1


def read(data: Mapping[str, Any]) -> tuple[Trace, ...]:
    """Read a parsed file.

    Raises:
        TraceError: the events are no list, or one lacks a field of its kind.
    """
    raw = RawTrace("Kineto")
    for properties in data.get("deviceProperties", ()):
        raw.device_names[int(properties.get("id"))] = _device_name(properties)
    events = data["traceEvents"]
    if not isinstance(events, list):
        raise TraceError("its traceEvents are no list")
    complete = [event for event in events if event.get("ph") == "X"]
    for event in complete:
        _read_event(raw, event)
    traces = raw.traces()
    return traces or _read_cpu(complete)


def _read_event(raw: RawTrace, event: Mapping[str, Any]) -> None:
    kind = event.get("cat")
    if kind == "kernel":
        raw.kernel(_device(event), str(event.get("name")), *_times(event))
    elif kind == "gpu_memcpy":
        match = _COPY.match(str(event.get("name")))
        if match is None:
            return
        lane, host = (Lane.IN, match[2]) if match[1] == "HtoD" else (Lane.OUT, match[3])
        if "bytes" not in event.get("args", {}):
            raise TraceError(f"copy '{event.get('name')}' has no bytes: it was recorded by a torch older than 1.9")
        nbytes = int(event["args"]["bytes"])
        raw.copy(_device(event), lane, *_times(event), nbytes, is_pageable=host == "Pageable")
    elif kind == "user_annotation":
        raw.range(str(event.get("name")), *_times(event))


def _read_cpu(events: list[Mapping[str, Any]]) -> tuple[Trace, ...]:
    raw = RawTrace("Kineto", ["compute is torch's operators; swaps are not seen"], {_CPU: "cpu"})
    for event in events:
        if event.get("cat") == "cpu_op" and str(event.get("name")).startswith("aten::"):
            raw.kernel(_CPU, str(event["name"]), *_times(event))
        elif event.get("cat") == "user_annotation":
            raw.range(str(event.get("name")), *_times(event))
    return raw.traces()


def _times(event: Mapping[str, Any]) -> tuple[int, int]:
    try:
        start = round(float(event["ts"]) * 1000)
        return start, start + round(float(event["dur"]) * 1000)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise TraceError(f"event '{event.get('name')}' has no times: {event}") from None


def _device(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("device", event.get("pid")))


def _device_name(properties: Mapping[str, Any]) -> str:
    return f"GPU {properties.get('id')}: {properties.get('name', 'unknown')}"
