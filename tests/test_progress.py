"""Long operations report their name, progress and duration; short ones report nothing."""

import logging
import re
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import lmswap
from lmswap import progress
from lmswap.capture import aot_stages
from lmswap.session import graph_capture, step_planning


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(progress, "_LONG_SECONDS", 0.3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    monkeypatch.setattr(progress, "_REDRAWN_SECONDS", 0.001)


def wait_for_longer():
    with progress.reported("counting sheep"):
        time.sleep(0.5)


def test_long_operations_are_reported_once_long_and_at_their_end(capsys):
    wait_for_longer()
    said = capsys.readouterr().err
    assert re.fullmatch(r"lmswap: counting sheep \.\.\. \(\d+ s\)\nlmswap: counting sheep: \d+ s\n", said)


def test_a_failed_operation_ends_its_progress(capsys):
    with pytest.raises(KeyError), progress.reported("counting sheep"):
        time.sleep(0.5)
        raise KeyError
    assert capsys.readouterr().err.endswith(" s\n")
    wait_for_longer()
    assert capsys.readouterr().err.endswith("lmswap: counting sheep: 1 s\n")


def test_short_operations_are_only_logged(capsys, caplog, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 60.0)
    with caplog.at_level(logging.INFO, "lmswap"), progress.reported("counting sheep"):
        pass
    assert capsys.readouterr().err == ""
    assert caplog.messages == ["counting sheep"]


def test_one_local_rank_reports_progress(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    wait_for_longer()
    assert capsys.readouterr().err == ""


def test_on_a_terminal_one_line_is_redrawn_and_only_the_summary_remains(capsys, terminal):
    wait_for_longer()
    said = capsys.readouterr().err
    *live, account, rest = re.split(r"\r\x1b\[K|\n", said)[1:]
    assert len(live) > 5
    assert set(live) <= {"lmswap: counting sheep ... (0 s)", "lmswap: counting sheep ... (1 s)"}
    assert (account, rest) == ("lmswap: counting sheep: 1 s", "")
    assert said.count("\n") == 1


def test_a_line_on_a_terminal_that_needs_no_account_is_erased(capsys, terminal, monkeypatch):
    monkeypatch.setattr(progress, "_LONG_SECONDS", 60.0)
    wait_for_longer()
    said = capsys.readouterr().err
    assert said.endswith("\r\x1b[K")
    assert "\n" not in said


def test_the_stage_under_way_is_reported_with_its_count_and_what_is_left(capsys, terminal):
    with progress.reported("sheep"), progress.stage("counting"):
        time.sleep(0.2)
        progress.set_progress(1, 21, 0.01)
        time.sleep(0.1)
        progress.set_progress(2, 21, 0.1)
        time.sleep(0.2)
    live = capsys.readouterr().err.split("\r\x1b[K")
    assert "lmswap: sheep: counting ... (0 s)" in live
    assert "lmswap: sheep: counting 1/21" in live  # too early for a guess
    left = {int(found[1]) for line in live if (found := re.match(r"lmswap: sheep: counting 2/21, about (\d+) s", line))}
    assert left
    assert left <= {3, 4, 5, 6}


def test_the_account_has_the_seconds_of_each_stage_without_those_within_it(capsys):
    with progress.reported("sheep", "counting"):
        time.sleep(0.6)
        with progress.stage("shearing"):
            time.sleep(0.6)
            with progress.reported("a wolf", "running"):
                time.sleep(1.6)
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"lmswap: sheep: 3 s \(counting 1, shearing 1, running 2\)", said)


def test_work_that_the_next_process_skips_is_not_estimated(capsys):
    with progress.reported("sheep", "counting"):
        time.sleep(0.6)
        with progress.stage("shearing", is_remembered=True):
            time.sleep(0.6)
            with progress.stage("running"):
                time.sleep(1.6)
    assert "; about 1 s at the next start" in capsys.readouterr().err


def test_stages_and_progress_outside_of_a_wait_are_nothing(capsys):
    with progress.stage("counting"):
        progress.set_progress(1, 2, 0.5)
    assert capsys.readouterr().err == ""


@contextmanager
def slow_stage(name, **how):
    """A stage that lasts long enough to be seen beside other processes."""
    with progress.stage(name, **how):
        time.sleep(0.3)
        yield


def test_all_of_the_first_call_is_covered_and_later_steps_report_nothing(capsys, terminal, monkeypatch, tmp_path):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LONG_SECONDS", 0.0)  # a warm process on a fast machine takes less than a third
    for module in (graph_capture, step_planning, aot_stages):
        monkeypatch.setattr(module, "stage", slow_stage)
    model = lmswap.enable(nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]))
    capsys.readouterr()
    started = time.monotonic()
    model(torch.ones(8, 64)).sum().backward()
    seconds = time.monotonic() - started
    said = capsys.readouterr().err
    for stage in ("tracing", "timing ops", "compiling"):
        assert f"lmswap: Sequential, first call: {stage}" in said
    covered = float(re.findall(r"first call: (\d+) s", said)[-1])
    assert covered >= seconds - 1.0
    model(torch.ones(8, 64)).sum().backward()
    assert capsys.readouterr().err == ""
    lmswap.disable(model)


def test_names_that_are_loaded_are_read_without_a_wait(monkeypatch):
    monkeypatch.setattr("lmswap.progress.reported", lambda *_: pytest.fail("waited"))
    assert lmswap.report is lmswap.api.report
