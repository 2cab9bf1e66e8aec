"""Rows of whole steps: lmswap's plan beside schedules of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.whole_step.__main__ import MACHINES, RESULTS, main
from benchmarks.whole_step.peers import PEERS
from benchmarks.whole_step.table import render
from lmswap.ir.machine import Machine


def row_of(model: str, budget: str, output: Path) -> dict[str, Any]:
    words = ["--models", model, "--batches", "2x16", "--budgets", budget, "--output", str(output)]
    assert main(words) == 0
    [(name, row)] = json.loads(output.read_text()).items()
    assert name == f"{model}, 1 micro-batches of 2x16, h100_sxm, {budget}"
    assert row["peers"].keys() == PEERS.keys()
    assert 0 < row["bytes"]["summed_gradient"] <= row["bytes"]["weight"]
    return row  # type: ignore[no-any-return]


def test_rows_hold_the_ratios_to_an_unlimited_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of("tiny-lora", "2MiB", tmp_path / "rows.json")
    assert row["ratio"] >= row["bound_ratio"] >= 1
    assert row["peak_bytes"] <= 2 * 2**20
    assert row["peers"]["offloaded_inputs"] == 1
    assert not row["ahead"]
    assert "is faster" not in capsys.readouterr().out


def test_the_output_says_where_cpu_adam_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of("tiny", "4MiB", tmp_path / "rows.json")
    assert row["needed_bytes"] > 4 * 2**20  # no buffer is large enough to move
    assert "torchao" in row["ahead"] == [peer for peer, ratio in row["peers"].items() if ratio]
    assert "torchao is faster (CPU Adam, other bits): 1." in capsys.readouterr().out


def test_stored_rows_name_the_schedules_that_are_faster() -> None:
    for row in json.loads(RESULTS.read_text()).values():
        faster = [peer for peer, ratio in row["peers"].items() if ratio and ratio < row.get("ratio", 1e9) - 5e-4]
        assert row["ahead"] == faster


def test_the_page_is_that_of_the_stored_rows() -> None:
    assert render(json.loads(RESULTS.read_text())) == RESULTS.with_suffix(".md").read_text()


def test_described_machines_are_readable() -> None:
    machines = [Machine.from_json(path.read_text()) for path in MACHINES.glob("*.json")]
    assert {machine.device_bytes for machine in machines} == {24 * 10**9, 80 * 10**9, 96 * 10**9}
