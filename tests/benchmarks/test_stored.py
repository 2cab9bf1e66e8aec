"""What is stored under benchmarks/results can be read by the code that would write it today, and says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.case_study.results import Results as CaseStudy
from benchmarks.conformance.results import read_results as read_conformance
from benchmarks.distributed.results import Results as Distributed
from benchmarks.first_hour import speed
from benchmarks.peers.results import read_results as read_peers
from benchmarks.programs.compare import read_outcomes

STORED = Path(__file__).parents[2] / "benchmarks" / "results"
WRITTEN_AGAIN: dict[str, Callable[[Path], Any]] = {
    "case_study_cpu/results.json": CaseStudy.read,
    "conformance_cpu.json": read_conformance,
    **{f"distributed_cpu/{path.name}": Distributed.read for path in (STORED / "distributed_cpu").glob("*.json")},
    **{f"peers_cpu/{path.name}": read_peers for path in (STORED / "peers_cpu").glob("*.json")},
}


@pytest.mark.parametrize("name", WRITTEN_AGAIN)
def test_stored_results_are_what_the_code_of_today_writes_of_them(name: str, tmp_path: Path):
    again = tmp_path / "again.json"
    WRITTEN_AGAIN[name](STORED / name).write(again)
    assert json.loads(again.read_text()) == json.loads((STORED / name).read_text())


def test_the_outcomes_that_plans_are_compared_with_can_be_read():
    assert read_outcomes(STORED / "programs.json")


@pytest.mark.parametrize("path", [*(STORED / "h200").glob("*unet3d*.json"), *(STORED / "h200").glob("*resnet50*.json")])
def test_the_tables_of_a_real_gpu_are_those_of_its_figures(path: Path):
    page = (STORED / "h200" / "README.md").read_text()
    assert "\n".join(speed.lines(json.loads(path.read_text()))) in page
