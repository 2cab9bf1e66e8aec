import json

import pytest

from lmswap.bench.unet3d import study as study_module
from lmswap.bench.unet3d.fresh import RunFailed
from lmswap.bench.unet3d.measured import Run
from lmswap.bench.unet3d.study import Settings, compare
from tests.benchmarks.runs import MIB, good_runs, make_run, make_study
from tests.benchmarks.scans import make_subject


@pytest.fixture
def settings(tmp_path):
    make_subject(tmp_path / "data")
    return Settings(
        sizes=(32, 48), steps=2, budget_bytes=None, policy="auto", head="conv", dtype="fp32", seed=0,
        data=tmp_path / "data", folder=tmp_path / "out",
    )  # fmt: skip


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
