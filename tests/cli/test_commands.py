import argparse
import gzip
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from benchmarks.unet3d import __main__ as unet3d
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.cli import entry
from lmswap.cli.doctor import doctor_text
from lmswap.cli.fit import Fit
from lmswap.cli.plan_text import plan_text
from lmswap.cli.step_plan import StepPlan
from lmswap.errors import LmswapError
from lmswap.hardware.survey import survey
from lmswap.ir.machine import Tier
from lmswap.ir.plan import Plan, Recompute
from lmswap.planner import POLICIES, check
from tests.cli.terminal_width import too_wide
from tests.ir.build import build
from tests.reporting.small_step import LINK, MACHINE, MIB, PLAN, PROGRAM

PEAK_BYTES = 7 * MIB + 8  # at grad_relu: conv, relu and grad_relu with the two scalars


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "lmswap", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def files(tmp_path):
    """A program and a machine to plan it for."""
    (tmp_path / "program.json").write_text(PROGRAM.to_json())
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    return tmp_path


def plan(files, *arguments):
    return entry.main(["plan", str(files / "program.json"), "--machine", str(files / "machine.json"), *arguments])


def test_the_version_is_that_of_the_package():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lmswap {version('lmswap')}\n")


@pytest.fixture
def unit_machine(monkeypatch):
    """A machine without a GPU that takes no time to measure; tests/hardware/test_measure.py measures in earnest."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "lmswap.hardware.measure._measure_machine",
        lambda device, tier, where: replace(MACHINE, tiers=(Tier(tier, 2**30, LINK),)),
    )


@pytest.mark.usefixtures("unit_machine")
def test_doctor_describes_this_machine(tmp_path, capsys):
    assert entry.main(["doctor", "--disk-directory", str(tmp_path)]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    for line in (
        "device",
        "memory",
        "software",
        "host link",
        "compute",
        "disk tier",
        "compressed tier",
        "out to the disk tier",
    ):
        assert f"\n{line} " in done.out
    assert not too_wide(done.out)
    assert f"in'{tmp_path}'on" in "".join(done.out.split())  # long paths fold
    headings = ["This machine", "Copies of lmswap, by size, GB/s (–: larger than was measured)"]
    headings += ["Speed that is left where copies overlap", "What lmswap will do here"]
    lines = done.out.splitlines()
    assert [line for before, line in itertools.pairwise(["", *lines]) if not before] == headings


@pytest.mark.usefixtures("unit_machine")
@pytest.mark.cpu_only("a GPU's default tier is not the disk")
def test_doctor_warns_of_zfs_as_the_disk_tiers_filesystem(tmp_path):
    found = survey(str(tmp_path))
    assert "ZFS" not in doctor_text(found)
    on_zfs = replace(found.directory, filesystem="zfs")
    assert not too_wide(doctor_text(replace(found, directory=on_zfs)))
    assert "ZFS reserves no room" in doctor_text(replace(found, directory=on_zfs))


@pytest.mark.usefixtures("unit_machine")
def test_doctor_as_json_holds_what_the_text_shows(tmp_path, capsys):
    assert entry.main(["doctor", "--json", "--disk-directory", str(tmp_path)]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    data = json.loads(done.out)
    assert data["schema"] == "lmswap.doctor/1"
    assert data["device"]["device"] == "cpu"
    assert data["directory"]["path"] == str(tmp_path)
    assert data["machines"]["disk"]["tiers"][0]["link"]["out_rate"]["points"]


@pytest.mark.usefixtures("unit_machine")
def test_doctor_without_a_disk_states_the_reason_and_the_remaining_tiers(tmp_path, capsys):
    assert entry.main(["doctor", "--disk-directory", str(tmp_path / "missing")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "disk tier NOT AVAILABLE: no directory for swap files" in text
    assert (
        'tier="compressed") swaps a model on cpu to the compressed tier only where tier=... names it: the disk' in text
    )


@pytest.mark.usefixtures("unit_machine")
def test_doctor_without_a_tier_fails_with_the_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lmswap.hardware.survey.tiers_to_try", lambda device: ("disk",))
    assert entry.main(["doctor", "--disk-directory", str(tmp_path / "missing")]) == 2
    assert "lmswap.enable will refuse" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_closes_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m lmswap doctor --disk-directory /missing | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert all(line.startswith("lmswap: measuring ") for line in done.stderr.splitlines())


def test_a_plan_is_made_and_printed(files, capsys):
    assert plan(files, "--budget", "8 MiB", "--policy", "none") == 0
    text = capsys.readouterr().out
    assert "Small: 5 ops, 7 buffers" in text
    assert "of a budget of 8.00 MiB" in text
    assert "All 6 buffers, 8.00 MiB together, are kept" in text


def test_a_plan_as_json_has_the_figures(files, capsys):
    # none keeps conv, relu, grad_relu (3 + 2 + 2 MiB), the gradient of 1 MiB, and two scalars of 4 bytes.
    assert plan(files, "--budget", "64MiB", "--policy", "none", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["policy"], data["budget_bytes"]) == ("lmswap.plan/3", "none", 64 * MIB)
    assert (data["kept_bytes"], data["swapped_bytes"], data["recomputed_bytes"]) == (8 * MIB + 8, 0, 0)
    assert data["peak_bytes"] == PEAK_BYTES
    assert 0 < data["lower_bound_seconds"] <= data["step_seconds"]
    assert data["planning_seconds"] > 0
    assert data["tier_bytes"] == {}


def test_a_plan_as_json_has_all_that_a_check_needs(files, capsys):
    assert plan(files, "--budget", "6.5MiB", "--json") == 0
    found = Plan.from_data(json.loads(capsys.readouterr().out)["plan"])
    assert found.swaps or found.recomputes
    check(found, PROGRAM, roofline(PROGRAM, MACHINE), MACHINE, tier="disk", min_swap_bytes=MIB)


def test_a_plan_that_keeps_all_buffers_names_them_on_request(tmp_path, capsys):
    ops = "\n".join(f"f{number} 1: b{number} -> b{number + 1}" for number in range(12))
    step = build(f"forward\n{ops}", sizes={f"b{number}": MIB for number in range(13)}, outputs="b12")
    (tmp_path / "long.json").write_text(step.program.to_json())
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    command = ["plan", str(tmp_path / "long.json"), "--budget", "64MiB", "--machine", str(tmp_path / "machine.json")]
    shown = {}
    for more in ([], ["--all-buffers"]):
        assert entry.main([*command, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        shown[bool(more)] = sum(line.startswith("1.00 MiB  keep") for line in lines)
    assert shown == {False: 0, True: 12}


def test_figures_count_swapped_and_recomputed_bytes():
    plan = replace(PLAN, recomputes=(Recompute(1, 3),))  # relu is recomputed for its use in backward; conv is swapped
    step = StepPlan(StepMemory(PROGRAM, roofline(PROGRAM, MACHINE)), MACHINE, plan, 8 * MIB, planning_seconds=0.1)
    figures = step.figures()
    assert (figures["swapped_bytes"], figures["recomputed_bytes"]) == (3 * MIB, 2 * MIB)
    assert figures["kept_bytes"] == 3 * MIB + 8  # grad_relu, the gradient, two scalars
    assert "5.00 s: at most 10.0 % above the best possible" in plan_text(step, Fit("8MiB", {1: step}, None, 1))


def test_a_plan_can_be_looked_at_as_a_page(files, tmp_path, capsys):
    assert plan(files, "--budget", "64MiB", "--policy", "none", "--html", str(tmp_path / "step.html")) == 0
    assert "policy none" in (tmp_path / "step.html").read_text()
    assert plan(files, "--budget", "1", "--html", str(tmp_path / "step.txt")) == 2
    assert "must end in .html" in capsys.readouterr().err  # before the budget is looked at


def test_a_budget_may_be_a_share_of_the_unplanned_peak(files, capsys):
    assert plan(files, "--budget", "100%", "--policy", "none", "--json") == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == PEAK_BYTES


def test_a_compressed_program_is_planned_alike(files, capsys):
    (files / "program.json.gz").write_bytes(gzip.compress(PROGRAM.to_json().encode()))
    arguments = ["--machine", str(files / "machine.json"), "--budget", "8MiB", "--policy", "none", "--json"]
    found = []
    for name in ("program.json", "program.json.gz"):
        assert entry.main(["plan", str(files / name), *arguments]) == 0
        found.append({**json.loads(capsys.readouterr().out), "planning_seconds": 0})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{}" * 99)[:-9], gzip.compress(b"\xff")],
    ids=["no gzip", "cut short", "no text"],  # named here: what gzip writes holds the time, and names must not
)
def test_a_damaged_compressed_file_is_one_line(tmp_path, capsys, content):
    (tmp_path / "x.json.gz").write_bytes(content)
    assert entry.main(["plan", str(tmp_path / "x.json.gz"), "--budget", "1GiB"]) == 2
    assert capsys.readouterr().err.startswith(f"lmswap: cannot read '{tmp_path / 'x.json.gz'}'")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--budget", "much"], "budget 'much' is not a byte count"),
        (["--budget", "-1GiB"], "budget must be more than 0 bytes, got '-1GiB'"),
        (["--budget", "0%"], "budget '0%' is not a share of the unplanned peak"),
        (["--budget", "most%"], "budget 'most%' is not a share of the unplanned peak"),
        (["--budget", "40"], 'budget \'40\' is 40 B, less than any step takes; say the unit, as in "40GiB" or "40%"'),
        (["--budget", "AUTO"], 'write an int, or a number with a unit, "6GiB", or a share, "50%"'),
        (["--budget", "1GiB", "--policy", "magic"], "magic"),
        (["--budget", "1GiB", "--tier", "host"], "machine 'unit' has no tier 'host'"),
        (["--budget", "1GiB", "--min-swap", "x"], "--min-swap 'x' is not a byte count"),
        (["--budget", "1GiB", "--machine", "missing.json"], "cannot read 'missing.json': No such file or directory"),
        (["--budget", "1GiB", "--machine", __file__], "test_commands.py': not a machine description"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(files, capsys, change, sentence):
    change = [f"{change[0]}={change[1]}", *change[2:]]  # as one word, a value may begin with a dash
    assert plan(files, *change) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lmswap: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


def test_a_file_that_holds_no_program_is_named(capsys):
    assert entry.main(["plan", __file__, "--budget", "1GiB"]) == 2
    assert capsys.readouterr().err.startswith(f"lmswap: cannot read '{__file__}': not a program file: ")


def test_the_help_of_plan_names_every_policy(capsys):
    with pytest.raises(SystemExit):
        entry.main(["plan", "--help"])
    reported = capsys.readouterr().out.partition("  --policy")[2].partition("  --tier")[0]
    assert set(POLICIES) <= set(re.findall(r"\w+", reported))


def test_an_error_in_a_process_of_its_own_has_no_traceback(files):
    done = run("plan", str(files), "--budget", "1GiB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lmswap: cannot read '{files}'")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_is_one_line_and_the_exit_code_of_its_signal(files, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lmswap.cli.step_plan.make_plan", interrupt)
    assert plan(files, "--budget", "8MiB") == 130
    assert capsys.readouterr().err == "lmswap: interrupted\n"


def commands_of(parser, name):
    """Names and parsers of ``parser`` and all below it."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, below in action.choices.items():
                yield from commands_of(below, f"{name} {inner}")


def test_the_example_in_each_help_is_one_that_the_command_takes():
    benchmark = "python -m benchmarks.unet3d"
    found = {**dict(commands_of(entry.make_parser(), "lmswap")), **dict(commands_of(unet3d.make_parser(), benchmark))}
    del found["lmswap bench"]  # only names the command that took its place
    assert len(found) > 8
    for name, parser in found.items():
        heading, _, example = (parser.epilog or "").partition(": ")
        assert heading == "example", name
        words = shlex.split(example)
        assert example.startswith(name)
        if name.startswith(benchmark):
            assert unet3d.make_parser().parse_args(words[3:]).run
        else:
            own = words.index("--") if "--" in words else len(words)
            assert entry.make_parser().parse_args(words[1:own]).run


def test_shell_completion_lists_the_commands():
    written = subprocess.run(
        [sys.executable, "-m", "shtab", "--shell=bash", "lmswap.cli.entry.make_parser"], capture_output=True, text=True
    )
    script = f"{written.stdout}\nCOMP_WORDS=(lmswap d); COMP_CWORD=1; _shtab_lmswap; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["doctor", "diff"]


def test_an_error_of_lmswap_becomes_one_line(files, monkeypatch, capsys):
    def fail(*_, **__):
        raise LmswapError("op 3\nconv")

    monkeypatch.setattr("lmswap.cli.step_plan.make_plan", fail)
    assert plan(files, "--budget", "8MiB") == 2
    assert capsys.readouterr().err == "lmswap: op 3 conv\n"


def test_a_refusal_is_itemized_in_lines_of_a_terminal(files, capsys):
    assert plan(files, "--budget", "1MiB") == 2
    first, *others = capsys.readouterr().err.split("\n")
    assert first.startswith("lmswap: policy 'auto' cannot fit this step into 1.0 MiB")
    assert len(others) > 4 and max(map(len, others)) <= 80


def test_ranks_name_the_command_that_took_their_place_with_the_same_arguments(capsys):
    line = "program.json --budget 40% --ranks 16 --network ac922 --json"
    assert entry.main(["plan", *line.split()]) == 2
    shown = capsys.readouterr()
    assert f"python -m benchmarks.distributed predict {line}\n" in shown.err
    assert not shown.out and shown.err.count("\n") == 1


def test_bench_names_the_command_that_took_its_place_with_the_same_arguments(capsys):
    assert entry.main(["bench", "unet3d", "compare", "--sizes", "144", "--data", "my scans", "--help"]) == 2
    shown = capsys.readouterr()
    assert "python -m benchmarks.unet3d compare --sizes 144 --data 'my scans' --help\n" in shown.err
    assert not shown.out and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("verify --json {0} {1}", "lmswap: '{0}' cannot be used: Is a directory"),
        ("profile --keep {1} -- python {1}", "lmswap: '{1}' cannot be used: File exists"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_in_one_line(tmp_path, capsys, line, said):
    (tmp_path / "train.py").write_text("")
    places = tmp_path, tmp_path / "train.py"
    assert entry.main(line.format(*places).split()) == 2
    assert capsys.readouterr().err == said.format(*places) + "\n"


@pytest.mark.parametrize("arguments", [[], ["cure"], ["bench"], ["bench", "resnet"], ["plan", "x.json"]])
def test_unknown_commands_and_missing_arguments_show_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main(arguments)
    assert caught.value.code == 2
    assert "usage: lmswap" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys\nfrom lmswap.cli import entry\n"
        "try: entry.main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_slowdown_of_a_link_by_the_other_direction_and_compute_is_shown(capsys):
    from lmswap.hardware.device import DeviceInfo
    from lmswap.hardware.disk import Directory
    from lmswap.hardware.host_memory import HostMemory
    from lmswap.hardware.link import HostLink
    from lmswap.hardware.survey import Survey

    machine = replace(MACHINE, tiers=(Tier("host", 2**33, LINK),))
    found = Survey(
        device=DeviceInfo("cuda:0", "Unit GPU", 2**34, 2**33, "2.13.0", "CUDA driver 1.2"),
        num_devices=2,
        link=HostLink("pcie", "PCIe gen4 x16", 31.5e9),
        ram=HostMemory(2**36, 2**35),
        directory=Directory("/var/tmp", "xfs", "/dev/sda", 2**40, 2**39),
        peer="cuda:1 (Unit GPU), directly, by NVLink",
        machines={"host": machine, "disk": MACHINE, "peer": replace(machine, tiers=(Tier("peer", 2**32, LINK),))},
        failures={},
    )
    text = doctor_text(found)
    assert not too_wide(text)
    rows = {line.split("  ")[0]: line.split()[-6:] for line in text.splitlines() if "host tier" in line}
    assert rows["out to the host tier"][-2:] == ["1.07", "1.07"]  # 2**30 B/s
    assert rows["in from the host tier"][-2:] == ["0.54", "0.54"]  # half of it
    assert rows["host tier"] == ["50", "%", "75", "%", "100", "%"]
    assert "host link    PCIe gen4 x16, 31.5 GB/s each way on paper" in text
    assert "the first of 2 visible GPUs" in text
    assert "host tier    up to 8.00 GiB of pinned memory" in text
    assert "disk tier    up to 1.00 GiB in '/var/tmp' on xfs (/dev/sda)" in text
    assert "peer tier    up to 4.00 GiB of cuda:1 (Unit GPU), directly, by NVLink" in text
    assert "1 GiB takes 1.00 s out and 2.00 s back in" in text
    assert "run lmswap doctor again" not in text
    assert "run lmswap doctor again" in " ".join(doctor_text(replace(found, load=1e4)).split())
