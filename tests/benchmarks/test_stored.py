"""Results stored under benchmarks/results can be read by the current code, with the same content."""

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
from benchmarks.first_hour.page import summary
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
def test_stored_results_are_written_alike_by_the_current_code(name: str, tmp_path: Path):
    again = tmp_path / "again.json"
    WRITTEN_AGAIN[name](STORED / name).write(again)
    assert json.loads(again.read_text()) == json.loads((STORED / name).read_text())


def test_the_outcomes_that_plans_are_compared_with_can_be_read():
    assert read_outcomes(STORED / "programs.json")


OF_SPEED = ("*unet3d*.json", "*resnet50*.json", "headline*.json", "stalls.json")


@pytest.mark.parametrize("path", [path for pattern in OF_SPEED for path in (STORED / "h200").glob(pattern)])
def test_the_tables_of_a_real_gpu_are_those_of_its_figures(path: Path):
    page = (STORED / "h200" / "README.md").read_text()
    assert "\n".join(speed.lines(json.loads(path.read_text()))) in page


@pytest.mark.parametrize("part", ["stalls", "mapped"])
def test_the_other_tables_of_a_real_gpu_are_those_of_its_figures(part: str):
    found = json.loads((STORED / "h200" / f"{part}.json").read_text())
    assert "\n".join(summary(part, found)) in (STORED / "h200" / "README.md").read_text()
