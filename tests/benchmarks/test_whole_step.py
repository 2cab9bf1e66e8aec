"""Whole steps of decoders that are never allocated, planned and beside block swap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.whole_step.__main__ import MACHINES, main
from benchmarks.whole_step.block_swap import plan_block_swap
from lmswap.ir.machine import Machine
from lmswap.planner import simulate, verify
from tests.ir.build import build, unit_machine

LAYERS = """
    inference
    a 1: x layers.0.W -> p
    b 1: p layers.1.W -> q
    c 1: q layers.2.W -> r
    d 1: r layers.3.W -> s
"""


def test_rows_hold_the_ratios_to_an_unlimited_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    words = ["--models", "tiny-lora", "--batches", "2x16", "--budgets", "2MiB", "--output", str(output)]
    assert main(words) == 0
    [(name, row)] = json.loads(output.read_text()).items()
    assert name == "tiny-lora, 1 micro-batches of 2x16, h100_sxm, 2MiB"
    assert row["ratio"] >= row["bound_ratio"] >= 1
    assert row["peak_bytes"] <= 2 * 2**20
    assert 0 < row["bytes"]["summed_gradient"] < row["bytes"]["weight"]
    assert name in capsys.readouterr().out


def test_described_machines_are_readable() -> None:
    machines = [Machine.from_json(path.read_text()) for path in MACHINES.glob("*.json")]
    assert {machine.device_bytes for machine in machines} == {24 * 10**9, 80 * 10**9, 96 * 10**9}


@pytest.mark.parametrize(("budget_bytes", "swapped"), [(10, 0), (8, 3), (6, 4)])
def test_block_swap_swaps_the_fewest_blocks_that_fit(budget_bytes: int, swapped: int) -> None:
    weights = [f"layers.{number}.W" for number in range(4)]
    step = build(LAYERS, weights=" ".join(weights), sizes=dict.fromkeys(weights, 2))
    names = {step.id(name): name for name in weights}
    buffers = tuple(type(b)(b.id, b.nbytes, b.kind, names.get(b.id, "")) for b in step.program.buffers)
    program = type(step.program)(
        step.program.name, step.program.ops, buffers, step.program.values, step.program.segments
    )
    plan = plan_block_swap(program, step.costs, unit_machine(), budget_bytes=budget_bytes, min_swap_bytes=1)
    assert plan is not None
    verify(program, step.costs, unit_machine(), plan)
    assert simulate(program, step.costs, unit_machine(), plan).peak_bytes <= budget_bytes
    assert len({swap.buffer for swap in plan.swaps}) == swapped


def test_block_swap_gives_up_where_all_blocks_are_too_few() -> None:
    step = build("inference\n a 1: x layers.0.W -> p", weights="layers.0.W", sizes={"p": 9})
    assert plan_block_swap(step.program, step.costs, unit_machine(), budget_bytes=5, min_swap_bytes=1) is None
