"""`lmswap plan --model`: plans a model that is never allocated."""

import json
import sys

import pytest

from lmswap.cli import entry
from lmswap.ir.program import BufferKind, Program
from tests.cli.terminal_width import too_wide
from tests.reporting.small_step import MACHINE

MODULE = """
import torch
from torch import nn

def tokens():
    return nn.Sequential(nn.Embedding(8, 2**12), nn.Linear(2**12, 2**12))

def layers():
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))

class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3))

def halves():
    return Images().bfloat16()

class Two(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, scale):
        return super().forward(x) * scale

class Branch(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

number = 3
"""


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Runs the command in a directory with a module; returns the exit code, the figures, and the error."""
    (tmp_path / "planned_models.py").write_text(MODULE)
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "planned_models", raising=False)

    def run(model, *arguments, budget="1GiB"):
        words = ["plan", "--model", f"planned_models:{model}", *arguments, "--machine", "machine.json", "--json"]
        code = entry.main(words if "--budget" in words else [*words, "--budget", budget])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return run


def test_the_saved_program_has_the_same_plan(plan, tmp_path, capsys):
    code, figures, _ = plan("tokens", "--batch", "2x8", "--save", "program.json")
    assert (code, figures["program"]) == (0, "Sequential")
    files = [str(tmp_path / "program.json"), "--machine", str(tmp_path / "machine.json")]
    assert entry.main(["plan", *files, "--budget", "1GiB", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    different = {"planning_seconds": 0, "note": ""}  # a file's note would be on what captured it
    assert again | different == figures | different


def test_the_budget_counts_no_parameters_on_a_cpu_and_states_what_enable_counts(plan):
    parameter_bytes = 4 * (8 * 2**12 + 2**24 + 2**12)
    _, figures, _ = plan("tokens", "--batch", "2x8")
    assert parameter_bytes < figures["peak_bytes"] < 2 * parameter_bytes  # the gradients
    assert "without margin, batch, traces and kernels, which lmswap.enable counts" in figures["note"]
    code, _, error = plan("tokens", "--batch", "2x8", budget="60MiB")
    assert code == 2
    error = " ".join(error.split())
    assert "The parameters, 64.1 MiB, existed before and do not count." in error
    assert "without margin, batch, traces and kernels, which lmswap.enable counts" in error


def test_a_forward_alone_swaps_weights(plan, capsys):
    weight_bytes = 4 * 2**20
    _, figures, _ = plan("layers", "--batch", "2x1024", "--forward-only", "--save", "program.json", budget="9MiB")
    assert figures["whole_step"] == {"parameters": 4 * weight_bytes, "gradients": 0, "optimizer state": 0}
    assert figures["copied_bytes"]["disk"]["in"] >= 2 * weight_bytes
    assert figures["copied_bytes"]["disk"]["out"] == 0  # they are never written
    assert figures["peak_bytes"] <= 9 * 2**20
    assert entry.main(["plan", "program.json", "--machine", "machine.json", "--budget", "9MiB"]) == 0  # of a file, too
    assert "16.00 MiB parameters" in capsys.readouterr().out
    code, _, error = plan("layers", "--batch", "2x1024", "--forward-only", "--optimizer", "adam")
    assert code == 2
    assert "a forward alone, which updates nothing" in error


def test_the_largest_batch_fits_and_the_next_does_not(plan, tmp_path, capsys):
    options = ["--forward-only", "--min-swap", "4KiB"]
    _, figures, _ = plan("layers", "--batch", "64Nx1024", *options, "--save", "program.json", budget="12MiB")
    assert figures["sizes"][0]["batch"] == "64x1024"
    fitting = [row["batch"] for row in figures["sizes"] if row["seconds_per_sample"]]
    rows = int(fitting[-1].removesuffix("x1024"))
    assert rows % 64 == 0
    assert figures["peak_bytes"] <= 12 * 2**20
    last = next(row for row in figures["sizes"] if row["batch"] == fitting[-1])
    assert last["seconds_per_sample"] == pytest.approx(figures["step_seconds"] / rows)
    program = Program.from_json((tmp_path / "program.json").read_text())
    assert program.bytes_of(BufferKind.OUTPUT) == 4 * rows * 1024  # the saved program is that of the largest
    assert plan("layers", "--batch", f"{rows}x1024", *options, budget="12MiB")[0] == 0
    assert plan("layers", "--batch", f"{rows + 64}x1024", *options, budget="12MiB")[0] == 2
    words = ["plan", "--model", "planned_models:layers", "--batch", "64Nx1024", "--machine", "machine.json", *options]
    assert entry.main([*words, "--budget", "12MiB"]) == 0
    printed = capsys.readouterr().out
    assert f"\n{rows}x1024" in printed
    assert too_wide(printed) == []


def test_several_budgets_make_a_table(plan, capsys):
    _, rows, _ = plan("layers", "--batch", "64Nx1024", "--forward-only", budget="1MiB,12MiB,16MiB")
    assert rows[0]["refused"].startswith("policy 'auto' cannot fit this step into 1.0 MiB")
    assert [row["budget_bytes"] for row in rows[1:]] == [12 * 2**20, 16 * 2**20]
    words = ["plan", "--model", "planned_models:layers", "--batch", "64Nx1024", "--machine", "machine.json"]
    assert entry.main([*words, "--forward-only", "--budget", "1MiB,12MiB,16MiB"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:4]] == ["budget", "1MiB", "12MiB", "16MiB"]
    assert f"needs {rows[0]['needed_bytes'] / 2**20:.2f} MiB" in printed.splitlines()[1]
    assert f"{rows[1]['copied_bytes']['disk']['in'] / 2**20:.2f} MiB" in printed.splitlines()[2]
    assert too_wide(printed) == []


@pytest.mark.parametrize(
    ("model", "batch", "dtypes"),
    [
        ("tokens", ["2x8"], ["int64"]),
        ("tokens", ["2x8:int32"], ["int32"]),
        ("Images", ["2x3x8x8"], ["float32"]),
        ("halves", ["2x3x8x8"], ["bfloat16"]),
        ("Two", ["2x4", "4:float64"], ["float32", "float64"]),
    ],
)
def test_inputs_have_the_dtype_of_the_model_unless_given(plan, tmp_path, model, batch, dtypes):
    assert plan(model, "--batch", *batch, "--save", "program.json")[0] == 0
    program = Program.from_json((tmp_path / "program.json").read_text())
    inputs = {buffer.id for buffer in program.buffers if buffer.kind == "input"}
    found = {value.buffer: value.dtype for value in program.values if value.buffer in inputs}
    assert [*found.values()] == dtypes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--batch", "2"], "planned_models:nothing cannot be imported: AttributeError"),
        (["number", "--batch", "2"], "planned_models:number is no function or class, but int"),
        (["Images"], "needs the shapes of its inputs"),
        (["Images", "--batch", "2y3"], "cannot read --batch 2y3"),
        (["Images", "--batch", "2x3:float3"], "cannot read --batch 2x3:float3"),
        (["Images", "--batch", "2Mx3"], "cannot read --batch 2Mx3"),
        (["Images", "--batch", "0Nx3"], "cannot read --batch 0Nx3"),
        (["Images", "--batch", "Nx3x8x8", "--budget", "40%"], "is not a byte count"),
        (["Images", "--batch", "2x3x8x8", "--budget", "1GiB,2GiB", "--html", "step.html"], "are for one budget"),
        (["Images", "--batch", "Nx3x8x8", "--budget", "1GiB,2GiB", "--save", "program.json"], "are for one budget"),
        (["Images", "--batch", "2x3x8x8", "--save", "missing/program.json"], "cannot write 'missing/program.json'"),
        (["Branch", "--batch", "2x4"], "aten._local_scalar_dense.default needs values"),
        (["Two", "--batch", "2x4"], "Two cannot be captured without its memory: Two.forward() missing 1 required"),
    ],
)
def test_what_cannot_be_planned_is_one_line(plan, arguments, message):
    code, _, error = plan(*arguments)
    assert code == 2
    assert message in error


def test_either_a_program_or_a_model_is_planned(plan, capsys, tmp_path):
    assert entry.main(["plan", "--budget", "1GiB", "--machine", str(tmp_path / "machine.json")]) == 2
    assert "either a program file or --model" in capsys.readouterr().err
    assert plan("Images", "program.json", "--batch", "2x3x8x8")[0] == 2


def test_modules_that_are_not_there_are_named(capsys, tmp_path, plan):
    words = ["plan", "--model", "no_such_module:make", "--batch", "2", "--budget", "1GiB"]
    assert entry.main([*words, "--machine", str(tmp_path / "machine.json")]) == 2
    assert "cannot be imported: ModuleNotFoundError" in capsys.readouterr().err
