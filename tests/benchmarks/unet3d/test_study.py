import json
import math
import subprocess

import pytest

from benchmarks.unet3d import study as study_module
from benchmarks.unet3d.measured import Failure, Run
from benchmarks.unet3d.study import Settings, compare
from tests.benchmarks.unet3d.runs import MIB, good_runs, make_run, make_study
from tests.benchmarks.unet3d.scans import make_subject


@pytest.fixture
def settings(tmp_path):
    make_subject(tmp_path / "data")
    return Settings(
        sizes=(32, 48), steps=2, budget_bytes=None, policies=("auto",), head="conv", dtype="fp32", seed=0,
        data=tmp_path / "data", folder=tmp_path / "out",
    )  # fmt: skip


class Children:
    """Stands for `run_compared`: answers each configuration at once, or fails those of ``failing``."""

    def __init__(self, failing=()):
        self.asked, self.needed_bytes, self.failing = [], [], failing

    def __call__(self, configurations, _logs, _on_event, needed_bytes):
        self.asked.extend(configurations)
        self.needed_bytes.append(needed_bytes)
        return [self._outcome(configuration) for configuration in configurations]

    def _outcome(self, configuration):
        if configuration.name in self.failing:
            return Failure(configuration, "was killed")
        return make_run(configuration, peak_bytes=(1000 if configuration.kind == "plain" else 900) * MIB)


def ask(monkeypatch, settings, failing=(), **changes):
    children = Children(failing)
    monkeypatch.setattr(study_module, "run_compared", children)
    result = compare(Settings(**{**vars(settings), **changes}), lambda *_: None, command="test")
    return children, result


def test_the_peak_of_the_first_size_is_the_budget_of_the_others(monkeypatch, settings):
    children, result = ask(monkeypatch, settings)
    assert [configuration.name for configuration in children.asked] == [
        "32³ plain",
        "48³ plain",
        "48³ swapped",
        "48³ unswapped",
    ]
    assert [c.budget_bytes for c in children.asked] == [None, None, 1000 * MIB, None]
    assert result.budget_bytes == 1000 * MIB
    # All three at once, if there is so much: plain and unswapped ones take 1000 MiB for each 32³ voxels.
    assert children.needed_bytes == [0, 1000 * MIB + 2 * 1000 * MIB * 48**3 / 32**3]
    assert result.data == "BraTS layout, as given"


def test_with_a_budget_every_size_is_swapped(monkeypatch, settings):
    children, _ = ask(monkeypatch, settings, budget_bytes=7 * MIB)
    assert [c.name for c in children.asked if c.budget_bytes == 7 * MIB] == ["32³ swapped", "48³ swapped"]
    assert len(children.asked) == 6
    # The first size is tried plainly by itself, as its memory is unknown.
    assert children.needed_bytes == [0, 1007 * MIB, 7 * MIB + 2 * 1000 * MIB * 48**3 / 32**3]


def test_each_policy_is_tried_within_the_budget(monkeypatch, settings):
    children, result = ask(monkeypatch, settings, policies=("auto", "swap"))
    assert [c.name for c in children.asked if c.budget_bytes] == ["48³ swapped", "48³ swapped-only"]
    assert result.find(48, "swapped").configuration.policy == "auto"
    assert children.needed_bytes[-1] == 2 * 1000 * MIB + 2 * 1000 * MIB * 48**3 / 32**3


def test_without_a_known_plain_peak_no_plain_run_is_tried_concurrently(monkeypatch, settings):
    children, _ = ask(monkeypatch, settings, failing=("32³ plain",), budget_bytes=7 * MIB)
    assert children.needed_bytes[:3] == [0, math.inf, 0]
    assert len(children.asked) == 6


def test_a_failed_run_does_not_stop_the_others(monkeypatch, settings):
    children, result = ask(monkeypatch, settings, failing=("48³ plain",))
    assert len(children.asked) == 4
    assert [(failure.configuration.name, failure.message) for failure in result.failures] == [
        ("48³ plain", "was killed")
    ]
    assert [run.configuration.name for run in result.runs] == ["32³ plain", "48³ swapped", "48³ unswapped"]


def test_without_a_budget_nothing_else_is_tried(monkeypatch, settings):
    children, result = ask(monkeypatch, settings, failing=("32³ plain",))
    assert len(children.asked) == 1
    assert result.budget_bytes is None and not result.runs


def test_the_results_file_states_the_origin_of_its_figures(tmp_path):
    study = make_study(*good_runs())
    study.write(tmp_path / "new" / "results.json")
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    assert written["schema"] == "lmswap.unet3d/1"
    assert {"command", "created", "data", "subjects", "machine", "budget_bytes"} <= set(written)
    assert written["machine"]["commit"] == "abcdef"
    assert [Run.from_fields(fields) for fields in written["runs"]] == list(study.runs)


def test_the_commit_distinguishes_changes_of_code_but_not_of_results(tmp_path, monkeypatch):
    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *arguments], check=True, capture_output=True)

    code, result = tmp_path / "lmswap" / "study.py", tmp_path / "benchmarks" / "results" / "found.json"
    for file in (code, result):
        file.parent.mkdir(parents=True)
        file.write_text("a")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(study_module, "__file__", str(code))
    commit = study_module.describe_machine().commit
    assert len(commit) == 40
    result.write_text("b")
    assert study_module.describe_machine().commit == commit
    changed = set()
    for text in ("b", "c"):
        code.write_text(text)
        changed.add(study_module.describe_machine().commit)
    assert len(changed) == 2 and all(text.startswith(f"{commit}+changes-") for text in changed)
    git("commit", "-am", "second")
    assert len(study_module.describe_machine().commit) == 40
