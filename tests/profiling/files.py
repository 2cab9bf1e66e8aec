"""One small run, written as each profiler writes it, in the columns of old and of new versions.

The run, in ms (device 0 unless said; the clock starts at ORIGIN)::

              0   2   4   6   8  10  12  14  16  18  20
    step      248................ 249.................
    kernels     ############                ############      1–4 and 3–7 on two streams, 14–20; device 1: 2–3
    in                  ########                              5–9: 8 MiB
    out                             ####                      10–12: 16 MiB
    others                        d   .. i ..                 device to device 9–10, memset, in: 64 KiB 12–13

Before the first step there is a kernel, at -6 to -5.
"""

import csv
import gzip
import io
import json
import sqlite3

MS = 1_000_000
MIB = 2**20
ORIGIN = 1_790_857_026_123_456_789
GPUS = ("NVIDIA H200", "Tesla V100-SXM2-16GB")

KERNELS = [
    (0, -6, -5, "void warm_up()"),
    (0, 1, 4, "cudnn::conv3d_forward"),
    (0, 3, 7, "void at::native::leaky_relu"),
    (0, 14, 20, "cudnn::conv3d_backward"),
    (1, 2, 3, "ncclDevKernel_AllReduce"),
]
# kind: start, end, bytes
COPIES = [("HtoD", 5, 9, 8 * MIB), ("DtoH", 10, 12, 16 * MIB), ("DtoD", 9, 10, MIB), ("HtoD", 12, 13, 2**16)]
STEPS = [(248, 0, 10), (249, 10, 20)]
OTHER_RANGES = [("forward", 0, 5), ("Optimizer.step#Adam.step", 9, 10)]
RANGES = [(f"lmswap step {number}", start, end) for number, start, end in STEPS] + OTHER_RANGES

CUPTI_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8}


def at(milliseconds):
    return ORIGIN + milliseconds * MS


def host_first(kind, host, device):
    """Source and destination memory of a copy."""
    return {"HtoD": (host, device), "DtoH": (device, host), "DtoD": (device, device)}[kind]


def fill(path, tables):
    """An SQLite file with ``tables``: name -> (columns, rows)."""
    with sqlite3.connect(path) as connection:
        for name, (columns, rows) in tables.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
            marks = ", ".join("?" * len(columns.split(",")))
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
    connection.close()
    return path


def nsys_tables(*, version=2025, pinned=1, ranges=RANGES):
    """Nsight Systems: 2020 has neither text ids nor tables that name kinds; 2025 has both, and more columns."""
    names = [name for *_, name in KERNELS]
    strings = [(100 + i, name) for i, name in enumerate(names)] + [
        (200 + i, name) for i, (name, *_) in enumerate(ranges)
    ]
    kernels = [(at(s), at(e), d, 7, 5000 + i, 100 + i, 100 + i) for i, (d, s, e, _) in enumerate(KERNELS)]
    copies = [(at(s), at(e), 0, 13, n, CUPTI_COPIES[kind], *host_first(kind, pinned, 2)) for kind, s, e, n in COPIES]
    tables = {
        "StringIds": ("id INTEGER PRIMARY KEY, value TEXT NOT NULL", strings),
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "start INT, end INT, deviceId INT, streamId INT, correlationId INT, demangledName INT, shortName INT",
            kernels,
        ),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            "start INT, end INT, deviceId INT, streamId INT, bytes INT, copyKind INT, srcKind INT, dstKind INT",
            copies,
        ),
        "CUPTI_ACTIVITY_KIND_MEMSET": ("start INT, end INT, deviceId INT, bytes INT", [(at(13), at(14), 0, 4096)]),
        "TARGET_INFO_GPU": ("id INT, name TEXT", list(enumerate(GPUS))),
    }
    if version == 2020:
        rows = [(at(start), at(end), 59, name) for name, start, end in ranges]
        tables["NVTX_EVENTS"] = ("start INT, end INT, eventType INT, text TEXT", rows)
        return tables
    rows = [(at(start), at(end), 60, None, 200 + i) for i, (_, start, end) in enumerate(ranges)]
    rows.append((at(19), None, 60, None, 200))  # a range that was still open when recording ended
    tables["NVTX_EVENTS"] = ("start INT, end INT, eventType INT, text TEXT, textId INT", rows)
    tables["ENUM_CUDA_MEM_KIND"] = (
        "id INT, name TEXT, label TEXT",
        [
            (0, "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE", "Pageable"),
            (1, "CUDA_MEMOPR_MEMORY_KIND_PINNED", "Pinned"),
            (2, "CUDA_MEMOPR_MEMORY_KIND_DEVICE", "Device"),
        ],
    )
    tables["TARGET_INFO_GPU"] = ("id INT, name TEXT, cuDevice INT", [(1 - i, n, i) for i, n in enumerate(GPUS)])
    return tables


def nsys(path, **options):
    return fill(path, nsys_tables(**options))


def nvprof_tables(*, version=12, pinned=2, ranges=RANGES):
    """nvprof: CUPTI's numbers; 8 puts kernels that ran one by one into another table and has no device table."""
    strings = [(1 + i, name) for i, (*_, name) in enumerate(KERNELS)]
    strings += [(50 + i, name) for i, (name, *_) in enumerate(ranges)] + [(90, GPUS[0]), (91, GPUS[1])]
    kernels = [(i, at(s), at(e), d, 7, 1 + i) for i, (d, s, e, _) in enumerate(KERNELS)]
    copies = [
        (i, CUPTI_COPIES[kind], *host_first(kind, pinned, 3), n, at(s), at(e), 0, 13)
        for i, (kind, s, e, n) in enumerate(COPIES)
    ]
    markers = []
    for i, (_, start, end) in enumerate(ranges):
        markers += [(at(start), 2, 10 + i, 50 + i), (at(end), 4, 10 + i, 0)]
    kernel_table = "CUPTI_ACTIVITY_KIND_KERNEL" if version == 8 else "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"
    tables = {
        "StringTable": ("_id_ INTEGER PRIMARY KEY, value TEXT NOT NULL", strings),
        kernel_table: ("_id_ INT, start INT, end INT, deviceId INT, streamId INT, name INT", kernels),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            "_id_ INT, copyKind INT, srcKind INT, dstKind INT, bytes INT, start INT, end INT, deviceId INT, stream INT",
            copies,
        ),
        "CUPTI_ACTIVITY_KIND_MARKER": ("timestamp INT, flags INT, id INT, name INT", markers),
    }
    if version > 8:
        tables["CUPTI_ACTIVITY_KIND_DEVICE"] = ("id INT, name INT", [(0, 90), (1, 91)])
    return tables


def nvprof_sqlite(path, **options):
    return fill(path, nvprof_tables(**options))


def nvprof_csv_text(*, version=12, time_unit="us", size_unit="MB", host="Pinned", peers=False):
    """nvprof --print-gpu-trace --csv: 7 has no memory types and no correlation; peer copies add four columns."""
    columns = ["Start", "Duration", "Grid X", "Grid Y", "Grid Z", "Block X", "Block Y", "Block Z"]
    columns += ["Registers Per Thread", "Static SMem", "Dynamic SMem", "Size", "Throughput"]
    columns += ["SrcMemType", "DstMemType"] * (version > 7) + ["Device", "Context", "Stream"]
    columns += ["Src Dev", "Src Ctx", "Dst Dev", "Dst Ctx"] * peers + ["Name"] + ["Correlation_ID"] * (version > 7)
    per_ms = {"s": 1e-3, "ms": 1, "us": 1e3, "ns": 1e6}[time_unit]
    per_byte = {"B": 1, "KB": 2**-10, "MB": 2**-20, "GB": 2**-30}[size_unit]
    units = {"Start": time_unit, "Duration": time_unit, "Size": size_unit, "Throughput": "GB/s", "Static SMem": "KB"}
    rows = []
    for device, start, end, name in KERNELS:
        rows.append((start, end, {"Grid X": 64, "Device": device, "Name": name + " [123]"}))
    for kind, start, end, nbytes in COPIES:
        source, target = host_first(kind, host, "Device")
        size = repr(nbytes * per_byte)
        more = {"Size": size, "SrcMemType": source, "DstMemType": target, "Device": 0}
        rows.append((start, end, {**more, "Name": f"[CUDA memcpy {kind}]"}))
    rows.append((13, 14, {"Size": "1.0", "SrcMemType": "Device", "Device": 0, "Name": "[CUDA memset]"}))
    file = io.StringIO()
    file.write("==4711== NVPROF is profiling process 4711, command: python train.py\n")
    file.write("==4711== Profiling result:\n" if version > 7 else "======== Profiling result:\n")
    file.write(",".join(f'"{column}"' for column in columns) + "\n")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([units.get(column, "") for column in columns])
    for start, end, values in sorted(rows, key=lambda row: row[0]):
        values["Device"] = f"{GPUS[values['Device']]} ({values['Device']})"
        values |= {"Start": repr((start + 100) * per_ms), "Duration": repr((end - start) * per_ms)}
        writer.writerow([values.get(column, "") for column in columns])
    return file.getvalue()


def nvprof_csv(path, **options):
    path.write_text(nvprof_csv_text(**options))
    return path


def kineto_data(*, version=2, host="Pinned", ranges=RANGES):
    """Kineto: 1 counts microseconds from 1970 and knows no devices; 2 counts from baseTimeNanoseconds."""
    base = ORIGIN if version == 2 else 0
    times = lambda start, end: {"ts": (at(start) - base) / 1e3, "dur": (end - start) * 1e3}  # noqa: E731
    events = [{"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}}]
    for device, start, end, name in KERNELS:
        args = {"stream": 7, "correlation": 11, "grid": [64, 1, 1]} | ({"device": device} if version == 2 else {})
        events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": 7, **times(start, end), "args": args}
        )
    for kind, start, end, nbytes in COPIES:
        source, target = host_first(kind, host, "Device")
        args = {"device": 0, "stream": 13, "bytes": nbytes, "memory bandwidth (GB/s)": nbytes / (end - start) / 1e6}
        name = f"Memcpy {kind} ({source} -> {target})"
        events.append(
            {"ph": "X", "cat": "gpu_memcpy", "name": name, "pid": 0, "tid": 13, **times(start, end), "args": args}
        )
    events.append({"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, **times(13, 14)})
    for name, start, end in ranges:
        for kind, shift in (("user_annotation", 0), ("gpu_user_annotation", 1)):
            event = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": 9, **times(start + shift, end + shift)}
            events.append(event)
    data = {"schemaVersion": 1, "traceEvents": events, "displayTimeUnit": "ms"}
    if version == 2:
        data["deviceProperties"] = [{"id": i, "name": name} for i, name in enumerate(GPUS)]
        data["baseTimeNanoseconds"] = base
    return data


def kineto(path, *, is_zipped=False, **options):
    text = json.dumps(kineto_data(**options)).encode()
    path.write_bytes(gzip.compress(text) if is_zipped else text)
    return path
