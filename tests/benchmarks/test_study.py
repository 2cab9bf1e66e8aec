import json
import signal
import sys

import pytest

from benchmarks.unet3d import study as study_module
from benchmarks.unet3d.run import Run
from benchmarks.unet3d.study import RunFailed, Settings, compare, run_fresh
from tests.benchmarks.runs import MIB, good_runs, make_configuration, make_run, make_study
from tests.benchmarks.scans import make_subject


@pytest.fixture
def settings(tmp_path):
    make_subject(tmp_path / "data")
    return Settings(
        sizes=(32, 48), steps=2, budget_bytes=None, policy="auto", head="conv", dtype="fp32", seed=0,
        data=tmp_path / "data", folder=tmp_path / "out",
    )  # fmt: skip


@pytest.fixture
def replaced_child(monkeypatch, tmp_path):
    """Runs a few lines of Python instead of the training, in a real process."""

    def replace(code):
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable}\nimport os, sys\nevents = int(sys.argv[-1])\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(study_module.sys, "executable", str(script))

    return replace


def fail_of(configuration, tmp_path):
    with pytest.raises(RunFailed) as failure:
        run_fresh(configuration, tmp_path / "logs", lambda *_: None)
    return str(failure.value)


def test_a_crash_is_reported_with_the_end_of_its_output(replaced_child, tmp_path):
    replaced_child("print('x\\n' * 99); sys.exit('no luck')")
    message = fail_of(make_configuration(), tmp_path)
    assert message.startswith("ended with exit status 1; its output is in ")
    assert message.endswith("no luck")
    assert "128-plain.log" in message


@pytest.mark.parametrize(("sent", "said"), [("SIGKILL", "ran out of memory"), ("SIGSEGV", "signal SIGSEGV")])
def test_a_signal_is_reported(replaced_child, tmp_path, sent, said):
    replaced_child(f"import signal; os.kill(os.getpid(), signal.{sent})")
    assert said in fail_of(make_configuration(), tmp_path)


def test_an_error_that_the_run_understood_is_reported_in_its_words(replaced_child, tmp_path):
    replaced_child('os.write(events, b\'{"event": "failed", "message": "budget too small"}\\n\'); sys.exit(1)')
    assert fail_of(make_configuration(), tmp_path) == "budget too small"


def test_a_child_goes_on_when_its_parent_says_so(replaced_child, tmp_path):
    replaced_child(
        """start = int(sys.argv[-3])
os.write(events, b'{"event": "ready"}\\n')
with os.fdopen(start) as file: line = file.readline().strip()
os.write(events, b'{"event": "failed", "message": "%s, %s"}\\n' % (line.encode(), os.environb[b"LMSWAP_TEST"]))"""
    )
    happened = []
    with pytest.raises(RunFailed, match="start, seen"):
        run_fresh(
            make_configuration(),
            tmp_path / "logs",
            lambda _, event: happened.append(event["event"]),
            when_ready=lambda: happened.append("released"),
            environment={"LMSWAP_TEST": "seen"},
        )
    assert happened == ["ready", "released", "failed"]


def test_an_interrupted_parent_leaves_no_child(replaced_child, tmp_path):
    replaced_child('os.write(events, b\'{"event": "pid", "pid": %d}\\n\' % os.getpid()); import time; time.sleep(60)')
    pids = []

    def interrupt(_configuration, event):
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fresh(make_configuration(), tmp_path / "logs", interrupt)
    with pytest.raises(ProcessLookupError):
        study_module.os.kill(pids[0], signal.SIG_DFL)


class Children:
    """Stands for `run_fresh`: answers each configuration at once, or fails those of ``failing``."""

    def __init__(self, failing=()):
        self.asked, self.failing = [], failing

    def __call__(self, configuration, _logs, _on_event):
        self.asked.append(configuration)
        if configuration.name in self.failing:
            raise RunFailed("was killed")
        return make_run(configuration, peak_bytes=(1000 if configuration.kind == "plain" else 900) * MIB)


def ask(monkeypatch, settings, failing=(), **changes):
    children = Children(failing)
    monkeypatch.setattr(study_module, "run_fresh", children)
    result = compare(Settings(**{**vars(settings), **changes}), lambda *_: None, command="test")
    return children.asked, result


def test_the_peak_of_the_first_size_is_the_budget_of_the_others(monkeypatch, settings):
    asked, result = ask(monkeypatch, settings)
    assert [configuration.name for configuration in asked] == ["32³ plain", "48³ plain", "48³ swapped", "48³ unswapped"]
    assert [configuration.budget_bytes for configuration in asked] == [None, None, 1000 * MIB, None]
    assert result.budget_bytes == 1000 * MIB
    assert result.data == "BraTS layout, as given"


def test_with_a_budget_every_size_is_swapped(monkeypatch, settings):
    asked, _ = ask(monkeypatch, settings, budget_bytes=7 * MIB)
    assert [c.name for c in asked if c.budget_bytes == 7 * MIB] == ["32³ swapped", "48³ swapped"]
    assert len(asked) == 6


def test_a_failed_run_does_not_stop_the_others(monkeypatch, settings):
    asked, result = ask(monkeypatch, settings, failing=("48³ plain",))
    assert len(asked) == 4
    assert [(failure.configuration.name, failure.message) for failure in result.failures] == [
        ("48³ plain", "was killed")
    ]
    assert [run.configuration.name for run in result.runs] == ["32³ plain", "48³ swapped", "48³ unswapped"]


def test_without_a_budget_nothing_else_is_tried(monkeypatch, settings):
    asked, result = ask(monkeypatch, settings, failing=("32³ plain",))
    assert len(asked) == 1
    assert result.budget_bytes is None and not result.runs


def test_the_results_file_says_where_its_figures_come_from(tmp_path):
    study = make_study(*good_runs())
    study.write(tmp_path / "new" / "results.json")
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    assert written["schema"] == "lmswap.unet3d/1"
    assert {"command", "created", "data", "subjects", "machine", "budget_bytes"} <= set(written)
    assert written["machine"]["commit"] == "abcdef"
    assert [Run.from_fields(fields) for fields in written["runs"]] == list(study.runs)
