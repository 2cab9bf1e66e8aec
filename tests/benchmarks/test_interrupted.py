"""Ctrl-C ends every benchmark with a sentence: its own process, and those that it has started."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# By module: what it calls while it measures, and its arguments.
MEASURING = {
    "case_study.__main__": ("_measure", []),
    "conformance.__main__": ("run_all", ["--packages", "torch", "--models", "nn.GLU"]),
    "distributed.__main__": ("_parts", ["allreduce"]),
    "emulated.__main__": ("_fresh", []),
    "fuzz": ("fuzz", []),
    "judge.__main__": ("judge_network", []),
    "peers.__main__": ("run_model", []),
    "programs.__main__": ("replay", ["--quick"]),
    "shapes.__main__": ("train_in_turns", ["--tasks", "text"]),
    "state.__main__": ("run_task", ["--tasks", "gpt", "--size", "tiny"]),
    "weights.__main__": ("run_task", ["--tasks", "decoder", "--size", "tiny"]),
    "whole_step.__main__": ("plan_rows", []),
    "soak": ("_no_memory", ["--steps", "1"]),  # in the middle of a step
}
# Tested in tests/benchmarks/test_first_hour.py and unet3d/test_commands.py; the third reads a file.
OTHERS = {"first_hour.__main__", "unet3d.__main__", "tests_kept"}


def test_all_benchmarks_are_here():
    files = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/*/__main__.py")]
    names = {
        ".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts)
        for file in files
        if "__main__" in file.read_text(encoding="utf-8")
    }
    assert names == MEASURING.keys() | OTHERS


@pytest.mark.parametrize("name", MEASURING)
def test_an_interrupted_benchmark_reports_the_interrupt(name, monkeypatch, tmp_path, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    measuring, arguments = MEASURING[name]

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, measuring, interrupt)
    monkeypatch.chdir(tmp_path)
    has_output = name.partition(".")[0] in ("conformance", "peers", "soak", "state", "weights")
    assert module.main([*arguments, *(["--output", str(tmp_path / "out")] if has_output else [])]) == 130
    assert re.fullmatch(r"(lmswap: measuring .*\n)*[a-z ]+: interrupted\n", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "child"),
    [
        (["peers", "--models", "gpt", "--output", "peers"], "forkserver"),
        (["conformance", "--packages", "torch", "--output", "conformance"], "forkserver"),
    ],
)
def test_ctrl_c_at_a_terminal_is_reported_once_by_the_started_process(arguments, child, tmp_path):
    """A terminal sends it to all processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    try:
        while not any(child in command for command in commands(process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(8)  # it imports torch, and begins
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "Traceback" not in said
        assert said.endswith(f"{arguments[0]}: interrupted\n")
        while (left := [*commands(process.pid)]) and time.monotonic() < until + 120:
            time.sleep(0.1)
        assert not left
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def commands(session):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                yield (folder / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
