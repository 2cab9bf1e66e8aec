"""Every reader against the same small run (`tests.profiling.files`), in several versions, and against broken files."""

import json
import sqlite3
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.profiling.figures import figures_of
from lmswap.profiling.readers import read_traces
from lmswap.profiling.readers.own import write_traces
from lmswap.profiling.trace import Stall, Trace
from tests.cases import cases
from tests.profiling import files

WITH_STEPS = {
    "nsys 2020": partial(files.nsys, version=2020),
    "nsys 2025": files.nsys,
    "nvprof 8": partial(files.nvprof_sqlite, version=8),
    "nvprof 12": files.nvprof_sqlite,
    "Kineto 1": partial(files.kineto, version=1),
    "Kineto 2": files.kineto,
    "Kineto 2, zipped": partial(files.kineto, is_zipped=True),
}
PAGEABLE = {
    "nsys 2020": partial(files.nsys, version=2020, pinned=0),
    "nsys 2025": partial(files.nsys, pinned=0),
    "nvprof": partial(files.nvprof_sqlite, pinned=1),
    "nvprof CSV": partial(files.nvprof_csv, host="Pageable"),
    "Kineto": partial(files.kineto, host="Pageable"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


@pytest.mark.parametrize("write", WITH_STEPS.values(), ids=WITH_STEPS)
def test_every_format_gives_the_figures_of_the_run(write, path):
    first, second = read_traces(write(path))
    assert first.notes == second.notes == ()
    assert [step.number for step in first.timeline.steps] == [248, 249]
    figures = figures_of(first.timeline)
    close = partial(pytest.approx, abs=2e-6)  # Kineto 1 writes microseconds since 1970: floats keep a quarter of one
    assert figures.window_seconds == close(0.020)
    assert first.timeline.spans[0].start_seconds == close(0.001)
    assert figures.utilization == close(12 / 20, abs=1e-3)
    assert figures.exposed_seconds == close(0.004)
    assert figures.overlap == close(2 / 6, abs=1e-3)
    assert figures.idle_seconds == close(0.020 - 0.012 - 0.004 - 0.001)
    assert figures.gap_seconds == (close(0.001),)
    copies = figures.copies_in
    assert (copies.num_copies, copies.nbytes, copies.num_small) == (1, 8 * files.MIB, 1)
    assert copies.bytes_per_second == close(8 * files.MIB / 0.004, rel=1e-3)
    assert figures.copies_out.bytes_per_step == 8 * files.MIB
    assert figures.invalid == ""
    assert figures_of(second.timeline).compute_seconds == 0.0
    assert figures_of(second.timeline).collective_seconds == close(0.001)


@pytest.mark.parametrize("version", [7, 12])
@pytest.mark.parametrize("units", [("s", "B"), ("ms", "KB"), ("us", "MB"), ("ns", "GB")])
def test_nvprofs_table_is_read_in_any_unit(version, units, path):
    time_unit, size_unit = units
    files.nvprof_csv(path, version=version, time_unit=time_unit, size_unit=size_unit, peers=version == 12)
    first, second = read_traces(path)
    figures = figures_of(first.timeline)  # from the kernel before the steps on: nothing marks them
    assert figures.window_seconds == pytest.approx(0.026)
    assert figures.compute_seconds == pytest.approx(0.013)
    assert figures.copies_out.nbytes == 16 * files.MIB
    assert "no ranges mark the steps: all of it counts as one" in first.notes
    assert second.device == "Tesla V100-SXM2-16GB (1)"


@pytest.mark.parametrize("write", [files.nsys, files.nvprof_sqlite, files.kineto])
def test_devices_are_called_by_cudas_number_and_name(write, path):
    assert [trace.device for trace in read_traces(write(path))] == [
        "GPU 0: NVIDIA H200",
        "GPU 1: Tesla V100-SXM2-16GB",
    ]


@pytest.mark.parametrize("write", PAGEABLE.values(), ids=PAGEABLE)
def test_pageable_copies_are_seen_in_every_format(write, path):
    figures = figures_of(read_traces(write(path))[0].timeline)
    assert (figures.num_pageable, figures.pageable_bytes) == (2, 24 * files.MIB)


def test_nsys_own_names_of_memory_kinds_count(path):
    tables = files.nsys_tables(pinned=7)
    columns, _ = tables["ENUM_CUDA_MEM_KIND"]
    tables["ENUM_CUDA_MEM_KIND"] = (columns, [(7, "…PAGEABLE", "Pageable"), (0, "…PINNED", "Pinned")])
    files.fill(path, tables)
    assert figures_of(read_traces(path)[0].timeline).num_pageable == 2


@pytest.mark.parametrize("name", ["ProfilerStep#{}", "step {}", "Iteration {}", "batch: {}", "training step {}"])
def test_ranges_of_other_scripts_are_steps_too(name, path):
    ranges = [(name.format(number), start, end) for number, start, end in files.STEPS]
    trace = read_traces(files.nsys(path, ranges=[*ranges, *files.OTHER_RANGES]))[0]
    assert [step.number for step in trace.timeline.steps] == [248, 249]
    assert "the steps are the host's" in trace.notes[0]


def test_a_step_of_several_processes_lasts_from_the_first_to_the_last(path):
    ranges = [("step 3", 2, 9), ("step 3", 1, 8), ("step 4", 9, 20), ("step 4", 8, 19)]
    steps = read_traces(files.nvprof_sqlite(path, ranges=ranges))[0].timeline.steps
    assert [(s.number, round(s.start_seconds * 1e3), round(s.end_seconds * 1e3)) for s in steps] == [
        (3, 0, 8),
        (4, 7, 19),
    ]


def test_steps_without_numbers_are_counted_from_0(path):
    ranges = [("Iteration", start, end) for _, start, end in files.STEPS]
    assert [step.number for step in read_traces(files.nsys(path, ranges=ranges))[0].timeline.steps] == [0, 1]


def test_steps_are_picked_by_number(path):
    trace = read_traces(files.kineto(path))[0].steps_between(249, 250)
    figures = figures_of(trace.timeline)
    assert (figures.num_steps, figures.copies_in.nbytes) == (1, 0)
    assert figures.compute_seconds == pytest.approx(0.006)
    assert figures_of(read_traces(path)[0].steps_between(248, 249).timeline).num_steps == 1
    with pytest.raises(TraceError, match="Kineto has steps 248 to 249, so steps 249 to 250 cannot be selected"):
        read_traces(path)[0].steps_between(249, 251)
    with pytest.raises(TraceError, match="has no steps"):
        read_traces(files.nvprof_csv(path))[0].steps_between(0, 1)


def test_times_keep_their_nanoseconds_however_late_the_clock(path):
    kernels = [span for span in read_traces(files.nsys(path))[0].timeline.spans if span.lane is Lane.COMPUTE]
    assert [(s.start_seconds, s.end_seconds) for s in kernels] == [
        (pytest.approx(start / 1e3, abs=1e-12), pytest.approx(end / 1e3, abs=1e-12))
        for start, end in ((1, 4), (3, 7), (14, 20))
    ]


def test_kineto_without_a_gpu_gives_torchs_operators(path):
    data = {
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 0, "dur": 50, "args": {}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "ts": 10, "dur": 30, "args": {}},
            {"ph": "X", "cat": "cpu_op", "name": "lmswap::swap_in_wait", "ts": 50, "dur": 40, "args": {}},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 100, "args": {}},
        ]
    }
    path.write_text(json.dumps(data))
    (trace,) = read_traces(path)
    assert (trace.device, trace.notes[0]) == ("cpu", "compute is torch's operators; swaps are not seen")
    assert figures_of(trace.timeline).utilization == pytest.approx(0.5)


def test_lmswaps_own_file_is_read_back_equal(path):
    spans = (Span(Lane.OUT, "x", 0.25, 0.5, 4096, 3), Span(Lane.COMPUTE, "forward 0", 0.0, 1.0))
    timeline = Timeline("own", spans, ((0.0, 17), (0.5, 12)), (Step(7, 0.0, 1.0),))
    stall = Stall("conv", "unet.py:3", "x", Lane.OUT, 2, 0.125)
    traces = (Trace("own", "cpu", timeline, (stall,), ("a note",)), Trace("own", "cuda:0", replace(timeline, steps=())))
    write_traces(path, traces)
    assert read_traces(path) == traces


def test_cuda_graphs_that_were_traced_as_a_whole_are_reported(path):
    tables = files.nsys_tables() | {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("start INT, end INT", [(1, 2)])}
    assert "--cuda-graph-trace=node" in " ".join(read_traces(files.fill(path, tables))[0].notes)


def test_copies_without_kernels_are_reported(path):
    tables = files.nsys_tables()
    del tables["CUPTI_ACTIVITY_KIND_KERNEL"]
    (trace,) = read_traces(files.fill(path, tables))
    assert "no kernel was recorded, so figures of compute are missing" in trace.notes


@pytest.mark.parametrize("make", [files.nsys_tables, files.nvprof_tables])
def test_a_table_without_a_needed_column_is_named(make, path):
    tables = make()
    columns, rows = tables["CUPTI_ACTIVITY_KIND_MEMCPY"]
    tables["CUPTI_ACTIVITY_KIND_MEMCPY"] = (columns.replace("bytes", "size"), rows)
    with pytest.raises(TraceError, match="table CUPTI_ACTIVITY_KIND_MEMCPY has no column bytes"):
        read_traces(files.fill(path, tables))


REFUSED = {
    "is none": (b"", "it is not a trace of Kineto"),
    "is noise": (bytes(range(256)) * 9, "damaged: UnicodeDecodeError"),
    "is another JSON": (b'{"a": 1}', "it is not a trace of Kineto"),
    "is a list": (b"[1, 2]", "it is not a trace of Kineto"),
    "is a newer own file": (b'{"schema": "lmswap.trace/9", "traces": []}', "expected schema 'lmswap.trace/1'"),
    "has no events": (b'{"traceEvents": []}', "neither kernels nor copies"),
    "has events of another kind": (b'{"traceEvents": "none"}', "traceEvents are no list"),
    "has an event without times": (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0}]}',
        "no times",
    ),
    "is zipped and cut": (b"\x1f\x8b\x08\x00", "it is a damaged gzip file"),
    "has no known unit": (files.nvprof_csv_text().replace("us,us", "min,us").encode(), "unit 'min'"),
    "has no unit row": (files.nvprof_csv_text().replace("us,us,", "").encode(), "unit"),
    "has a summary": (b'"Start","Duration","Name"\nus,us,\n', "no column Size, Device: record with --print-gpu-trace"),
    "has a word for a number": (
        files.nvprof_csv_text(time_unit="ms").replace("101,", "x,").encode(),
        "'x' in column Start",
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_unusable_files_are_refused_with_name_and_reason(content, message, path):
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as refused:
        read_traces(path)
    assert str(path) in str(refused.value)


def test_other_databases_missing_files_and_nsys_reports_are_refused(path, tmp_path):
    files.fill(path, {"SAMPLES": ("id INT", [(1,)])})
    with pytest.raises(TraceError, match="neither nsys' nor nvprof's table of strings"):
        read_traces(path)
    with pytest.raises(TraceError, match="No such file"):
        read_traces(tmp_path / "missing")
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"QdstrmReport")
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        read_traces(report)


@pytest.mark.parametrize("write", [files.nsys, files.nvprof_sqlite, files.kineto, files.nvprof_csv])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_refused(write, share, path):
    data = write(path).read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceError):
        read_traces(path)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    writers = (files.nsys, files.nvprof_sqlite, files.kineto, files.nvprof_csv)
    return [write(folder / f"file {number}").read_bytes() for number, write in enumerate(writers)]


@cases(150)
@given(
    which=st.integers(0, 3), damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8)
)
def test_any_wrong_byte_is_read_or_refused(contents, which, damage, path):
    data = bytearray(contents[which])
    for place, value in damage:
        data[int(place * (len(data) - 1))] = value
    path.write_bytes(data)
    try:
        traces = read_traces(path)
    except TraceError:
        return
    for trace in traces:
        if trace.timeline.seconds > 0:
            assert 0 <= figures_of(trace.timeline).utilization <= 1


def test_values_of_a_wrong_kind_are_damage(path):
    files.nsys(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    connection.close()
    with pytest.raises(TraceError, match="damaged: ValueError"):
        read_traces(path)


def test_a_copy_that_ends_before_it_begins_is_refused(path):
    files.nsys(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET end = start - 1")
    connection.close()
    with pytest.raises(TraceError, match="'copy in' on device 0 runs from"):
        read_traces(path)
