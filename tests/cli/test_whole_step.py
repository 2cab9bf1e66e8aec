"""`lmswap plan --optimizer`: one budget for parameters, gradients, optimizer state and activations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmswap.cli import entry
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.program import BufferKind, Program
from tests.ir.build import build
from tests.reporting.small_step import MACHINE

TEXT = """
    forward
    f 1: x W -> a
    g 1: a V -> y
    backward
    gv 1: t a V -> dV da
    gw 1: da x W -> dW
"""
MIB = 2**20
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command on a program of two parameters of 8 MiB; returns the exit code, the output, and the error."""
    sizes = dict.fromkeys(("W", "V", "dW", "dV", "a", "da"), 8 * MIB)
    step = build(TEXT, sizes=sizes, outputs="y", tangents="t", gradients="dW dV")
    fixed = FixedMemory(before_bytes=17 * MIB, parameter_bytes=16 * MIB)
    pairs = tuple((step.id(name), step.id(f"d{name}")) for name in ("W", "V"))
    values = (replace(v, shape=(step.program.buffers[v.buffer].nbytes // 4 or 1,)) for v in step.program.values)
    program = replace(step.program, values=tuple(values), fixed=fixed, gradients=pairs)
    (tmp_path / "program.json").write_text(program.to_json())
    (tmp_path / "untrained.json").write_text(step.program.to_json())
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, file: str = "program.json", budget: str = "100MiB") -> tuple[int, str, str]:
        code = entry.main(["plan", file, "--machine", "machine.json", "--budget", budget, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def figures(printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed)
    return found


def test_a_budget_counts_parameters_gradients_and_state(plan: Plan) -> None:
    code, printed, _ = plan("--optimizer", "adam", "--json")
    assert code == 0
    found = figures(printed)
    nbytes = {"parameters": 16 * MIB, "gradients": 16 * MIB, "optimizer state": 32 * MIB}
    assert found["whole_step"] == nbytes
    assert 48 * MIB < found["peak_bytes"] <= 100 * MIB
    assert found["step_budget_bytes"] == 99 * MIB  # without what else the model holds


def test_what_does_not_fit_is_swapped_over_the_link(plan: Plan) -> None:
    _, printed, _ = plan("--optimizer", "adam", "--json", budget="68MiB")
    found = figures(printed)
    swaps = found["plan"]["swaps"]
    copied = {"in": 8 * MIB * len(swaps), "out": 8 * MIB * sum(swap["out_start"] is not None for swap in swaps)}
    assert found["copied_bytes"] == {"disk": copied}
    assert copied["in"] > 0
    _, printed, _ = plan("--optimizer", "adam", budget="68MiB")
    assert "whole step" in printed
    assert "x a device without a limit" in printed
    read = rf"disk +{copied['in'] / MIB:.2f} MiB read and {copied['out'] / MIB:.2f} MiB written a step"
    assert re.search(read, printed)


@pytest.mark.parametrize(("budget", "moves"), [("50MiB", True), ("100MiB", False)])
def test_a_plan_that_moves_weights_says_that_training_fetches_them_in_each_step(
    plan: Plan, budget: str, moves: bool
) -> None:
    for budgets in (budget, f"{budget},200MiB"):
        _, printed, _ = plan("--optimizer", "sgd", "--micro-batches", "2", budget=budgets)
        assert ("enable fetches them in each step" in " ".join(printed.split())) is moves


def test_the_roofline_is_that_of_the_steps_flops(plan: Plan, tmp_path: Path) -> None:
    program = Program.from_json((tmp_path / "program.json").read_text())
    ops = (replace(op, flops=1000) for op in program.ops)
    (tmp_path / "counted.json").write_text(replace(program, ops=tuple(ops)).to_json())
    found = figures(plan("--optimizer", "sgd", "--json", "--micro-batches", "2", file="counted.json")[1])
    num_updated = 2 * 8 * MIB // 4
    assert found["roofline_seconds"] == (2 * 4 * 1000 + 2 * num_updated) / MACHINE.flops_per_second
    share = found["roofline_seconds"] / found["step_seconds"]
    printed = plan("--optimizer", "sgd", "--micro-batches", "2", file="counted.json")[1]
    assert f"for its FLOPs alone: {100 * share:.0f} % of what the hardware allows" in printed


def test_a_refusal_says_what_reduces_the_state_of_a_whole_step(plan: Plan, tmp_path: Path) -> None:
    _, _, error = plan("--optimizer", "adam", budget="20MiB")
    error = " ".join(error.split())
    # gv uses V, dV, a and da.
    assert "(parameters, gradients and optimizer state among them: 16.0 MiB)" in error
    assert "smaller layers, fewer trained parameters, or a smaller batch or image, of about 18 % of this one" in error
    program = Program.from_json((tmp_path / "program.json").read_text())
    buffers = (replace(b, nbytes=MIB) if b.kind is BufferKind.ACTIVATION else b for b in program.buffers)
    (tmp_path / "short.json").write_text(replace(program, buffers=tuple(buffers)).to_json())
    # The update of V needs its gradient, and twice as much state.
    _, _, error = plan("--optimizer", "adam", file="short.json", budget="20MiB")
    error = " ".join(error.split())
    assert "(parameters, gradients and optimizer state among them: 32.0 MiB)" in error
    assert "smaller layers, fewer trained parameters, an optimizer with less state; a smaller batch or image" in error
    assert "cannot suffice" in error
    assert "--min-swap" not in error


def test_a_refusal_names_the_buffers_that_are_too_small_to_be_swapped(plan: Plan) -> None:
    _, _, error = plan("--optimizer", "adam", "--min-swap", "20MiB", budget="40MiB")
    assert re.search(r"a --min-swap below 20.00 MiB \([\d.]+ MiB of smaller buffers stay\)", " ".join(error.split()))


def test_the_page_shows_what_is_swapped_over_the_step_end(plan: Plan, tmp_path: Path) -> None:
    code, printed, error = plan("--optimizer", "adam", "--json", "--html", "step.html", budget="50MiB")
    assert code == 0, error
    assert any(swap["first_use"] >= 6 for swap in figures(printed)["plan"]["swaps"])  # of six ops, two updates included
    assert "adam of W" in (tmp_path / "step.html").read_text()


def memory_on(page: Path) -> dict[str, list[int]]:
    """The bytes of a page's memory curve, and of its kinds."""
    found = re.search(r'<script type="application/json" id="step">(.*)</script>', page.read_text())
    assert found is not None
    [curve] = json.loads(found[1])["memory"]
    return {"all": [n for _, n in curve["points"]]} | {kind["name"]: kind["nbytes"] for kind in curve["kinds"]}


def test_the_page_and_the_picture_stack_the_kinds(plan: Plan, tmp_path: Path) -> None:
    files = ["--html", "step.html", "--plot", "step.svg"]
    assert plan("--optimizer", "adam", *files)[0] == 0
    held = memory_on(tmp_path / "step.html")
    assert {*held["parameters"]} == {16 * MIB}
    assert {*held["optimizer state"]} == {32 * MIB}
    assert held["gradients"][0] == 0
    assert max(held["gradients"]) == 8 * MIB  # each is used by the update that follows it
    assert max(held["all"]) == figures(plan("--optimizer", "adam", "--json")[1])["peak_bytes"]
    picture = (tmp_path / "step.svg").read_text()
    assert all(f">{name}<" in picture for name in held.keys() - {"all"})
    assert plan("--optimizer", "adam", *files, budget="50MiB")[0] == 0
    held = memory_on(tmp_path / "step.html")
    assert min(held["parameters"] + held["optimizer state"]) < 16 * MIB  # swapped
    assert min(map(min, held.values())) >= 0


def test_a_step_of_several_micro_batches_takes_longer(plan: Plan) -> None:
    once, twice = (
        figures(plan("--optimizer", "adam", "--json", "--micro-batches", count)[1])["step_seconds"]
        for count in ("1", "2")
    )
    assert 1.5 * once < twice < 2.5 * once


@pytest.mark.parametrize(
    ("arguments", "file", "message"),
    [
        (["--optimizer", "adamm"], "program.json", "unknown optimizer 'adamm'; known are"),
        (["--micro-batches", "2"], "program.json", "give --optimizer"),
        (["--clip-norm"], "program.json", "give --optimizer"),
        (["--optimizer", "adam", "--micro-batches", "0"], "program.json", "must be at least 1, not 0"),
        (["--optimizer", "adam"], "untrained.json", "does not say which gradients"),
        (["--optimizer", "adam", "--policy", "tflms"], "program.json", "moves activations only"),
    ],
)
def test_errors_say_what_to_give(plan: Plan, arguments: list[str], file: str, message: str) -> None:
    code, _, error = plan(*arguments, file=file)
    assert code == 2
    assert message in error
