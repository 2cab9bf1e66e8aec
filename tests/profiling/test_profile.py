"""Scripts that are profiled for real, on the CPU: as `lmswap profile` runs them, and with `lmswap.profile` in them."""

import importlib
import json
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lmswap
from lmswap import api
from lmswap.cli import entry
from lmswap.errors import OptionError, WindowError
from lmswap.ir.timeline import Lane
from lmswap.profiling import run, tools
from lmswap.profiling.profile import Profile
from lmswap.profiling.readers import read_traces
from lmswap.profiling.trace import Stall
from lmswap.profiling.window import Window
from tests.cli.terminal_width import too_wide
from tests.profiling import files

optimizer_module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it behind a function

MIB = 2**20
SCRIPT = """
import json, sys
import torch, lmswap
from torch import nn
from torch.utils.data import DataLoader

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 8)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.tanh(self.second(x))
        return self.last(x)

torch.manual_seed(0)
assert __name__ == "__main__" and sys.argv == [sys.argv[0], "out.json", "--flag"]
model = lmswap.enable(Net(), budget="2GiB", policy="swap_all", link="100MB/s")
optimizer = torch.optim.Adam(model.parameters())
train, valid = (DataLoader(torch.randn(count * 1024, 512), batch_size=1024) for count in (6, 2))
steps = []
for epoch in range(2):
    for x in train:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = lmswap.report(model)
        steps.append([report.swapped_out_bytes, report.swapped_in_bytes, report.measured_seconds])
    with torch.no_grad():
        for x in valid:
            model(x)
json.dump(steps, open(sys.argv[1], "w"))
"""
PLAIN = """
import torch
parameter = torch.nn.Parameter(torch.ones(256, 256))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(8):
    (parameter @ parameter).sum().backward()
    optimizer.step()
print("the script came to its end")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "train.py").write_text(text)
        return ["--", "python", "train.py"]

    return write


@pytest.mark.slow
def test_figures_of_chosen_steps_equal_those_of_the_reports(script, tmp_path, monkeypatch, capfd):
    command = [*script(SCRIPT), "out.json", "--flag"]
    monkeypatch.setattr(tools, "find_profilers", lambda: tools.Host((), None, frozenset({"nsys"})))
    options = ["--tool", "nsys", "--steps", "2:5", "--epoch", "2", "--json", "profile.json", "--trace", "trace.json"]
    options += ["--keep", "kept"]
    assert entry.main(["profile", *options, *command]) == 0
    printed, errors = capfd.readouterr()
    note = "nsys cannot work here: torch finds no GPU, and it sees nothing else; lmswap was used instead"
    assert f"lmswap: {note}" in errors
    assert f"Note: {note}." in " ".join(printed.split())
    assert "steps 2 to 4 of epoch 2 of python train.py out.json --flag" in printed

    reports = json.loads((tmp_path / "out.json").read_text())[6 + 2 : 6 + 5]
    (device,) = json.loads((tmp_path / "profile.json").read_text())["devices"]
    figures = device["figures"]
    assert device["tool"] == "lmswap's record"
    assert figures["num_steps"] == 3
    assert sum(out for out, _, _ in reports) == figures["copies_out"]["nbytes"] > 6 * MIB
    assert sum(in_ for _, in_, _ in reports) == figures["copies_in"]["nbytes"] > 6 * MIB
    in_graphs = sum(seconds for _, _, seconds in reports)
    assert figures["compute_seconds"] > in_graphs - figures["stall_seconds"] > 0  # the optimizer's steps come on top
    assert figures["utilization"] == pytest.approx(figures["compute_seconds"] / figures["window_seconds"])
    assert len(figures["gap_seconds"]) == 2

    assert "Link EMULATED: 0.1 GB/s out, 0.1 GB/s in" in printed
    for way in ("copies_in", "copies_out"):
        assert 0 < figures[way]["bytes_per_second"] < 200e6  # a late sleep is made up for by the next copy
    waits = device["stalls"]
    assert sum(stall["seconds"] for stall in waits) == pytest.approx(figures["stall_seconds"])
    assert any(stall["source"] == "train.py:14 x = torch.tanh(self.second(x))" for stall in waits)
    assert {stall["lane"] for stall in waits} == {"in", "out"}

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["cat"] == "step"]
    assert [event["name"] for event in steps] == ["step 8", "step 9", "step 10"]
    assert steps[-1]["ts"] + steps[-1]["dur"] == pytest.approx(figures["window_seconds"] * 1e6)
    copies = [event for event in events if event["ph"] == "X" and event["cat"] in ("in", "out")]
    moved_bytes = figures["copies_in"]["nbytes"] + figures["copies_out"]["nbytes"]
    assert sum(event["args"]["bytes"] for event in copies) == moved_bytes

    assert entry.main(["profile", "--read", "kept/lmswap.json", "--steps", "9:11"]) == 0
    assert "the waits are those of all its 3 steps" in capfd.readouterr().out


def test_kineto_sees_torchs_operators_where_there_is_no_gpu(script, capfd):
    command = script(PLAIN)
    assert entry.main(["profile", "--tool", "kineto", "--steps", "2:5", "--keep", "kept", *command]) == 0
    printed = capfd.readouterr().out
    assert "the script came to its end" in printed
    (trace,) = read_traces("kept/kineto.json")
    assert [step.number for step in trace.timeline.steps] == [2, 3, 4]
    names = {span.name for span in trace.timeline.spans}
    assert {"aten::mm", "aten::sum"} <= names


@pytest.fixture
def run_inside(tmp_path, monkeypatch):
    """Runs a script as `lmswap profile` has it run in a process of its own, and gives its exit code and outcome."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])

    def run_script(text, window, tool="kineto", command=("train.py",), **more):
        (tmp_path / "train.py").write_text(text)
        request = {"tool": tool, "window": asdict(window), "folder": str(tmp_path), "stop": False} | more
        (tmp_path / "request.json").write_text(json.dumps(request))
        hooks_before = dict(optimizer_module._global_optimizer_post_hooks)  # of models that other tests enabled
        try:
            code = run.main([str(tmp_path / "request.json"), *command])
        except SystemExit as ended:
            code = ended.code
        assert optimizer_module._global_optimizer_post_hooks == hooks_before
        return code, json.loads((tmp_path / "outcome.json").read_text())

    return run_script


def test_a_script_that_ends_early_states_how_many_steps_it_had(run_inside):
    assert run_inside(PLAIN, Window(5, 10)) == (None, {"first": None, "epochs": [8], "error": ""})


LOOPS = PLAIN.replace("    (parameter", "  for _ in torch.utils.data.DataLoader(range(3)):\n    (parameter")


@pytest.mark.parametrize("window", [Window(2, 4, epoch=1), Window(5, 7, epoch=1)])
def test_an_epoch_too_short_for_the_window_runs_to_its_end(window, run_inside, capsys):
    code, outcome = run_inside(LOOPS, window)
    assert code is None
    assert f"did not have all {window}: epoch 1 had 3 steps, epoch 2 had 1 steps" in outcome["error"]
    assert sum(outcome["epochs"]) == 24
    assert "came to its end" in capsys.readouterr().out
    code, outcome = run_inside(LOOPS, window, stop=True)
    assert (code, outcome["epochs"]) == (2, [3, 1])
    assert "came to its end" not in capsys.readouterr().out


def test_without_a_loader_the_steps_of_an_epoch_must_be_given(run_inside):
    code, outcome = run_inside(PLAIN, Window(1, 3, epoch=2, steps_per_epoch=3))
    assert (code, outcome["first"], outcome["epochs"]) == (None, 4, [3, 3, 2])


def test_steps_count_across_epochs_where_no_epoch_is_chosen(script, capfd, tmp_path):
    (tmp_path / "kept").mkdir()
    command = script(LOOPS)
    assert entry.main(["profile", "--tool", "kineto", "--keep", "kept", *command]) == 0  # the default steps
    printed = " ".join(capfd.readouterr().out.split())
    assert "came to its end" in printed
    assert "steps 5 to 9 of python train.py" in printed
    assert "an epoch ended before the last of these steps" in printed
    (trace,) = read_traces("kept/kineto.json")
    assert [step.number for step in trace.timeline.steps] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("owner", "fails"),
    [
        (run.KinetoRecorder, "start"),
        (run.KinetoRecorder, "step_ended"),
        (torch.profiler.profile, "export_chrome_trace"),
    ],
)
def test_a_failing_profiler_does_not_affect_the_script(owner, fails, run_inside, capsys, monkeypatch):
    monkeypatch.setattr(owner, fails, lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    code, outcome = run_inside(PLAIN, Window(2, 4))
    assert (code, outcome) == (None, {"first": None, "epochs": [8], "error": "OSError: no space left"})
    assert "came to its end" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["package/script.py"], ["-m", "package.module"]])
def test_scripts_and_modules_find_their_neighbours_and_their_arguments(command, run_inside, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "neighbour.py").write_text("answer = 42")
    checks = "import sys; assert (answer, sys.argv[1:], __name__) == (42, ['-m', 'x'], '__main__')"
    (tmp_path / "package" / "script.py").write_text(f"from neighbour import answer; {checks}")
    (tmp_path / "package" / "module.py").write_text(f"from .neighbour import answer; {checks}")
    code, outcome = run_inside("", Window(), command=[*command, "-m", "x"])
    assert (code, outcome["epochs"]) == (None, [])


def test_without_an_enabled_model_lmswaps_record_is_refused(run_inside):
    code, outcome = run_inside(PLAIN, Window(2, 4), tool="lmswap")
    assert (code, outcome["epochs"]) == (None, [8])
    assert "no model is enabled in this process" in outcome["error"]
    assert "profile with the tool kineto" in outcome["error"]


def test_with_stop_the_script_ends_with_the_window(run_inside, capsys):
    code, outcome = run_inside(PLAIN, Window(2, 4), stop=True)
    assert (code, outcome) == (0, {"first": 2, "epochs": [4], "error": ""})
    assert "came to its end" not in capsys.readouterr().out


def test_nsys_and_nvprof_capture_surrounds_the_ranges_of_the_steps(run_inside, monkeypatch):
    calls = []
    for module, name in (
        *((torch.cuda.profiler, name) for name in ("start", "stop")),
        *((torch.cuda.nvtx, name) for name in ("range_start", "range_end")),
    ):
        monkeypatch.setattr(module, name, lambda *given, name=name: calls.append((name, *given)) or len(calls))
    code, outcome = run_inside(PLAIN, Window(2, 4), tool="nsys")
    assert (code, outcome["first"]) == (None, 2)
    assert calls == [
        ("start",),
        ("range_start", "lmswap step 2"),
        ("range_end", 2),
        ("range_start", "lmswap step 3"),
        ("range_end", 4),
        ("stop",),
    ]


def test_figures_of_the_window_are_printed_before_the_script_ends(run_inside, tmp_path):
    looks = "import pathlib; assert pathlib.Path('outcome.json').exists()"
    assert run_inside(f"{PLAIN}{looks}", Window(2, 4))[1]["first"] == 2
    (tmp_path / "outcome.json").unlink()
    with pytest.raises(AssertionError):
        run_inside(f"{PLAIN}{looks}", Window(5, 10))


def test_an_error_of_the_script_is_its_own(run_inside):
    with pytest.raises(ZeroDivisionError):
        run_inside(PLAIN + "1 / 0", Window(2, 4))
    assert run_inside("import sys; sys.exit(3)", Window()) == (3, {"first": None, "epochs": [], "error": ""})


def test_a_script_that_fails_gives_its_exit_code(script, tmp_path, capfd):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "outcome.json").write_text('{"first": 5, "epochs": [10], "error": "of an earlier run"}')
    command = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert entry.main(["profile", "--keep", "kept", *command]) == 137
    assert "the profiled script ended by signal 9: nothing is reported" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile"], "give a command or a file to read"),
        (["profile", "--read", "x", "--", "python", "t.py"], "give a command or a file to read"),
        (["profile", "--read", "x", "--epoch", "2"], "a file numbers its steps without epochs"),
        (["profile", "--read", "missing"], "cannot read 'missing': No such file"),
        (["profile", "--json", "no/where.json", "--read", "x"], "folder 'no' does not exist"),
        (["profile", "--steps-per-epoch", "20", "--", "python", "t.py"], "say which with --epoch"),
        (["profile", "--steps", "9", "--", "python", "t.py"], "steps '9' are not FIRST:STOP"),
        (["profile", "train.py", "--lr", "1"], "lmswap profile -- python train.py --lr 1"),
        (["profile", "--steps", "5:10", "python", "train.py"], "lmswap profile -- python train.py"),
        (["profile", "--", "python", "missing.py"], "there is no script 'missing.py' in "),
        (["profile", "--tool", "nvvp", "--", "python", "t.py"], "unknown tool 'nvvp'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, message, capfd):
    assert entry.main(arguments) == 2
    assert message in capfd.readouterr().err


def test_the_table_shows_the_figures_of_a_step(tmp_path):
    traces = read_traces(files.kineto(tmp_path / "trace.json"))
    note = "nsys cannot work here: no program 'nsys' is installed; kineto was used instead"
    lines = str(Profile("two steps", traces, [note])).splitlines()
    rows = {line[:29].strip(): line[29:].split("  ") for line in lines if line[:29].strip()}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells["utilization"] == ["60.0 %", "0.0 %"]
    assert cells["step, median"] == ["10.0 ms", "10.0 ms"]
    assert cells["copied in, a step"] == ["4.00 MiB", "0 B"]
    assert cells["copying exposed, a step"] == ["2.00 ms", "0 s"]
    assert cells["copying hidden by compute"] == ["33.3 %", "–"]
    assert cells["collectives, a step"] == ["0 s", "500 µs"]
    assert cells["collectives hidden by compute"] == ["–", "0.0 %"]
    assert cells["idle, a step"] == ["1.50 ms", "9.50 ms"]
    assert cells["gap between steps, mean"] == ["1.00 ms", "0 s"]
    assert f"Note: {note}." in " ".join(lines)
    assert not too_wide("\n".join(lines))


def test_long_names_of_ops_and_lines_fold_in_the_table_of_waits(tmp_path):
    (trace, *_) = read_traces(files.kineto(tmp_path / "trace.json"))
    op, line = "encoder.blocks.11.attention.out_projection: addmm", "training/networks/encoder.py:311 x = self.out(x)"
    stalls = (Stall(op, line, "encoder.blocks.11.norm: native_layer_norm", Lane.IN, 3, 0.25),)
    text = str(Profile("two steps", (replace(trace, stalls=stalls),), []))
    assert not too_wide(text)
    assert "…" not in text


def test_pageable_copies_are_no_valid_measurement(tmp_path, capfd):
    path = files.kineto(tmp_path / "trace.json", host="Pageable")
    assert entry.main(["profile", "--read", str(path), "--json", str(tmp_path / "p.json")]) == 2
    assert "NOT A VALID MEASUREMENT (Kineto): 2 of the copies, 24.00 MiB" in capfd.readouterr().out
    assert not json.loads((tmp_path / "p.json").read_text())["devices"][0]["is_valid"]


def _train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(torch.ones(8 * steps, 16), batch_size=8):
        model(x).sum().backward()
        optimizer.step()


def test_a_block_is_a_window_and_its_figures_come_with_its_end():
    model = lmswap.enable(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), budget="1GiB")
    _train(model, 4)
    with lmswap.profile("lmswap") as profile:
        with pytest.raises(WindowError, match="not over"):
            str(profile)
        _train(model, 3)
    (figures,) = profile.figures
    assert figures.num_steps == 3
    assert 0 < figures.utilization < 1
    assert "3 steps in a block" in str(profile)
    lmswap.disable(model)


def test_a_block_with_kineto_has_a_column_of_each():
    model = lmswap.enable(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), budget="1GiB")
    _train(model, 4)
    with lmswap.profile(tool="kineto") as profile:
        _train(model, 2)
    assert [trace.tool for trace in profile.traces] == ["Kineto", "lmswap's record"]
    assert [figures.num_steps for figures in profile.figures] == [2, 2]
    assert all(figures.window_seconds > 0 for figures in profile.figures)
    lmswap.disable(model)


def test_a_block_without_steps_models_or_a_usable_tool_is_refused():
    with pytest.raises(WindowError, match="no training step ended"), lmswap.profile(tool="kineto"):
        pass
    with pytest.raises(OptionError, match="no model is enabled"), lmswap.profile(tool="lmswap"):
        pass
    with pytest.raises(OptionError, match=r"choose one of auto, kineto, lmswap$"), lmswap.profile(tool="nvvp"):
        pass
    with pytest.raises(OptionError, match="nsys must run around the whole script"), lmswap.profile(tool="nsys"):
        pass


def test_kineto_is_refused_while_the_script_runs_its_own_profiler():
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as own,
        pytest.raises(OptionError, match="there can be only one: use another tool"),
        lmswap.profile(tool="kineto"),
    ):
        pass
    assert own.events() is not None


def test_waits_after_the_last_step_are_not_counted():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
    lmswap.enable(model, budget="1GiB", policy="swap_all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1024, 512)
    model(x).sum().backward()
    with lmswap.profile("lmswap") as profile:
        model(x).sum().backward()
        optimizer.step()
        model(x).sum().backward()
    (trace,), (figures,) = profile.traces, profile.figures
    assert {stall.num for stall in trace.stalls} == {1}
    assert sum(stall.seconds for stall in trace.stalls) == pytest.approx(figures.stall_seconds)
    assert figures.copies_in.num_copies == figures.copies_out.num_copies == 2
    lmswap.disable(model)


def test_an_error_in_the_block_is_raised_and_recording_ends():
    model = lmswap.enable(nn.Sequential(nn.Linear(16, 16)), budget="1GiB")
    hooks = list(optimizer_module._global_optimizer_post_hooks)
    with pytest.raises(ZeroDivisionError), lmswap.profile("lmswap"):
        _train(model, 1)
        raise ZeroDivisionError
    assert [session.recorder.observers for session in api.sessions()] == [[]] * len(api.sessions())
    assert list(optimizer_module._global_optimizer_post_hooks) == hooks
    lmswap.disable(model)
