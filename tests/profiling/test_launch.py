"""The choice of the tool and its command lines; nsys and nvprof do not run here."""

import sys
from pathlib import Path

import pytest

from lmswap.errors import OptionError, TraceError
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.profiling.launch import OWN, TOOL_FILES, _traces, _under_run, profiler_command
from lmswap.profiling.readers.own import write_traces
from lmswap.profiling.tools import Host, choose
from lmswap.profiling.trace import Trace
from tests.profiling import files

A100 = ("NVIDIA A100", (8, 0))
V100, T4, H200 = ("Tesla V100", (7, 0)), ("Tesla T4", (7, 5)), ("NVIDIA H200", (9, 0))
BOTH = frozenset({"nsys", "nvprof"})
RUN = ["-m", "lmswap.profiling.run", "/tmp/folder/request.json"]


@pytest.mark.parametrize(
    ("tool", "host", "used", "reason"),
    [
        ("auto", Host((H200,), "13.0", BOTH), "kineto", ""),
        ("auto", Host((), None, BOTH), "lmswap", ""),
        ("nvprof", Host((V100,), "12.4", BOTH), "nvprof", ""),
        ("nvprof", Host((T4,), "12.9", BOTH), "nvprof", ""),
        ("nvprof", Host((V100, H200), "12.4", BOTH), "kineto", "compute capability 8.0 on, and NVIDIA H200 has 9.0"),
        (
            "nvprof",
            Host((V100,), "13.0", BOTH),
            "kineto",
            "removed in CUDA 13.0, and this torch is built for CUDA 13.0",
        ),
        ("nvprof", Host((V100,), "12.4", frozenset({"nsys"})), "kineto", "no program 'nvprof' is installed"),
        ("nsys", Host((H200,), "13.0", BOTH), "nsys", ""),
        (
            "nsys",
            Host((H200,), "13.0", frozenset()),
            "kineto",
            "no program 'nsys' is installed; kineto was used instead",
        ),
        ("nsys", Host((), None, BOTH), "lmswap", "torch finds no GPU"),
        ("kineto", Host((), None, frozenset()), "kineto", ""),
        ("lmswap", Host((H200,), "13.0", BOTH), "lmswap", ""),
    ],
)
def test_a_tool_that_cannot_work_is_replaced_and_the_reason_reported(tool, host, used, reason):
    chosen, note = choose(tool, host)
    assert chosen == used
    assert reason in note
    assert bool(note) == (tool not in ("auto", used))


def test_an_unknown_tool_is_refused():
    with pytest.raises(OptionError, match="unknown tool 'nvvp': choose one of auto, kineto, nsys, nvprof, lmswap"):
        choose("nvvp", Host((), None, frozenset()))


@pytest.mark.parametrize(
    ("command", "watched"),
    [
        (["python", "train.py", "--steps", "3"], [sys.executable, *RUN, "train.py", "--steps", "3"]),
        (["/opt/bin/python3.12", "train.py"], ["/opt/bin/python3.12", *RUN, "train.py"]),
        (["python3", "-m", "pkg.train", "-x"], [sys.executable, *RUN, "-m", "pkg.train", "-x"]),
        (
            ["python", "-u", "-W", "ignore", "-X", "dev", "t.py", "-m"],
            [sys.executable, "-u", "-W", "ignore", "-X", "dev", *RUN, "t.py", "-m"],
        ),
    ],
)
def test_pythons_own_options_stay_before_the_script(command, watched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in ("train.py", "t.py"):
        (tmp_path / script).touch()
    assert _under_run(command, Path("/tmp/folder")) == watched


@pytest.mark.parametrize("command", [[], ["torchrun", "train.py"], ["./train.py"], ["python"], ["python", "-c", "1"]])
def test_commands_that_cannot_be_watched_are_refused(command):
    with pytest.raises(OptionError, match="what is profiled must"):
        _under_run(command, Path("/tmp"))


def test_a_script_that_is_not_there_is_refused_before_python_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=f"^there is no script 'train.py' in '{tmp_path}'$"):
        _under_run(["python", "-u", "train.py", "--lr", "1"], Path("/tmp"))


@pytest.mark.parametrize(
    ("tool", "write"), [("nsys", files.nsys), ("nvprof", files.nvprof_sqlite), ("kineto", files.kineto)]
)
def test_steps_of_a_tool_are_shown_next_to_lmswaps_own_record(tool, write, tmp_path):
    write(tmp_path / TOOL_FILES[tool])
    assert [len(trace.timeline.steps) for trace in _traces(tool, tmp_path, 249, 1)] == [1, 1]
    own = Trace("own", "cpu", Timeline("own", (Span(Lane.COMPUTE, "forward 0", 0.0, 1.0),), ()))
    write_traces(tmp_path / OWN, [own])
    assert [trace.tool for trace in _traces(tool, tmp_path, 248, 2)][2:] == ["own"]
    with pytest.raises(TraceError, match="so steps 248 to 250 cannot be selected"):
        _traces(tool, tmp_path, 248, 3)
    (tmp_path / TOOL_FILES[tool]).unlink()
    with pytest.raises(TraceError, match="No such file"):
        _traces(tool, tmp_path, 248, 2)


def test_nsys_and_nvprof_record_between_profiler_start_and_stop_only():
    command, folder = ["python", "train.py"], Path("/tmp/folder")
    nsys = profiler_command("nsys", command, folder)
    assert nsys[:2] == ["nsys", "profile"]
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--export=sqlite"} < set(nsys)
    assert "--output=/tmp/folder/nsys" in nsys
    nvprof = profiler_command("nvprof", command, folder)
    assert nvprof[:3] == ["nvprof", "--profile-from-start", "off"]
    assert nvprof[-3:] == ["/tmp/folder/nvprof.sqlite", *command]
    assert (
        profiler_command("kineto", command, folder)
        == profiler_command("lmswap", command, folder)
        == nsys[-2:]
        == command
    )
