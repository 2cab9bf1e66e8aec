"""The trace against the rules of the trace event format that a viewer relies on."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from lmswap.errors import OptionError
from lmswap.ir.timeline import Lane, Span, Timeline
from tests.reporting.small_step import MIB, planned_report, report

NUMBER = (int, float)


@pytest.fixture
def trace(tmp_path):
    report().to_chrome_trace(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_event_has_the_fields_of_its_phase(trace):
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
    for event in events(trace, "X"):
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], NUMBER)
        assert isinstance(event["dur"], NUMBER)
        assert event["dur"] >= 0
    for event in events(trace, "C"):
        assert isinstance(event["ts"], NUMBER)
        assert all(isinstance(value, NUMBER) for value in event["args"].values())


def test_processes_and_threads_are_named(trace):
    named = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events(trace, "M")}
    assert named[1, 0, "process_name"] == {"name": "predicted"}
    assert named[2, 0, "process_name"] == {"name": "measured"}
    for event in events(trace, "X"):
        assert named[event["pid"], event["tid"], "thread_name"] == {"name": event["cat"]}


def test_copies_that_overlap_get_threads_of_their_own(tmp_path):
    # 0-2, 1-3 and 2-4 need two threads: the third begins where the first ends.
    spans = tuple(Span(Lane.IN, f"copy {start}", start, start + 2, MIB) for start in (1, 0, 2))
    report(measured=Timeline("measured", spans, ())).to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["pid"] == 2 and e["name"] == "thread_name"}
    placed = {event["name"]: names[event["tid"]] for event in events(trace, "X") if event["pid"] == 2}
    assert placed == {"copy 0": "in", "copy 1": "in 2", "copy 2": "in"}


def test_events_of_one_thread_do_not_overlap(trace):
    threads = defaultdict(list)
    for event in events(trace, "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_times_are_microseconds_and_copies_carry_their_bytes(trace):
    (copy,) = [event for event in events(trace, "X") if event["cat"] == "out" and event["pid"] == 2]
    assert (copy["ts"], copy["dur"]) == (2e6, 0.75e6)
    assert copy["args"] == {"bytes": 3 * MIB, "bytes_per_second": 4 * MIB, "buffer": 1}


def test_the_memory_counter_reaches_the_peak(trace):
    for pid, peak_bytes in ((1, 10 * MIB), (2, 9 * MIB)):
        resident = [event["args"]["resident bytes"] for event in events(trace, "C") if event["pid"] == pid]
        assert max(resident) == peak_bytes


def test_before_the_first_step_only_the_prediction_is_written(tmp_path):
    planned_report().to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {1}


def test_nothing_to_write_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(OptionError, match="run a training step first"):
        planned_report(program=None, plan=None, predicted=None).to_chrome_trace(tmp_path / "trace.json")
    with pytest.raises(OptionError, match=r"folder '.*missing' does not exist"):
        report().to_chrome_trace(tmp_path / "missing" / "trace.json")
