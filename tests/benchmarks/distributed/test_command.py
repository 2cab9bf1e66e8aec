"""The command that predicts several ranks: its table, its figures and what it refuses."""

import json

import pytest

from benchmarks.distributed import __main__ as distributed
from benchmarks.distributed.prediction.network import PRESETS
from lmswap.ir.machine import Link, Machine, Rate, Tier
from tests.cli.terminal_width import too_wide
from tests.reporting.small_step import MIB, PROGRAM

LINK = Link(Rate.constant(2**30), Rate.constant(2**29))
MACHINE = Machine("unit", 2**30, 1e9, 1e9, 1e-6, (Tier("disk", 2**30, LINK),))


@pytest.fixture
def files(tmp_path):
    """A program and a machine to plan it for."""
    (tmp_path / "program.json").write_text(PROGRAM.to_json())
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    return tmp_path


def predict(files, *arguments):
    program, machine = str(files / "program.json"), str(files / "machine.json")
    return distributed.main(["predict", program, "--machine", machine, *arguments])


RANKS = ["--budget", "64MiB", "--policy", "none", "--network", "x86"]


def test_ranks_are_planned_up_to_their_number(files, capsys):
    assert predict(files, *RANKS, "--ranks", "6") == 0
    text = capsys.readouterr().out
    assert "x86, PCIe gen3, two GPUs a bus; all-reduce: ring" in text
    assert "1.00 MiB in 1 buckets, summed as the backward makes them" in text
    assert not too_wide(text)
    rows = [line.split() for line in text.splitlines() if line.lstrip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "6"]


def test_ranks_as_json_have_the_figures(files, capsys):
    assert predict(files, *RANKS, "--ranks", "2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["algorithm"]) == ("lmswap.plan.ranks/2", "ring")
    assert (data["gradient_bytes"], data["num_buckets"]) == (MIB, 1)
    alone, both = data["ranks"]
    assert (alone["num_ranks"], alone["all_reduce_seconds"], alone["hidden_share"]) == (1, 0, None)
    # The gradient is the last to be made: what two ranks need for 1 MiB at 7.6 GB/s lengthens the step.
    assert both["all_reduce_seconds"] == pytest.approx(MIB / 7.6e9)
    assert both["step_seconds"] == pytest.approx(alone["step_seconds"] + MIB / 7.6e9)
    assert both["lower_bound_seconds"] <= both["step_seconds"]
    assert both["efficiency"] == pytest.approx(alone["step_seconds"] / both["step_seconds"])


def test_a_network_can_be_described_in_a_file(files, capsys):
    (files / "network.json").write_text(PRESETS["ac922"].to_json())
    found = []
    for network in ("ac922", str(files / "network.json")):
        assert predict(files, *RANKS[:-1], network, "--ranks", "16", "--json") == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    # Hierarchical: nodes are full.
    assert [row["num_ranks"] for row in json.loads(found[0])["ranks"]] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("ranks", "network", "sentence"),
    [
        ("2", "nvlink", "takes a file, or one of ac922, x86"),
        ("2", ".", "cannot read '.': it is a directory, not a file"),
        ("2", __file__, "test_command.py': not a network description"),
        ("9", "x86", "is one node of 8 ranks, not of 9"),
        ("0", "x86", "there must be 1 rank or more, not 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(files, capsys, ranks, network, sentence):
    assert predict(files, "--budget", "1GiB", "--ranks", ranks, "--network", network) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("distributed: ") and sentence in printed.err and printed.err.count("\n") == 1
