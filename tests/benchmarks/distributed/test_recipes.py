"""The recipes of benchmarks.distributed: who trains on what, in which steps; what sums are; how ranks end and go on."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from benchmarks.distributed import __main__ as distributed
from benchmarks.distributed import unet3d
from benchmarks.distributed.conductor import Group, compare_in_turns
from benchmarks.distributed.lars import TRUST, Lars
from benchmarks.distributed.launch import Launcher, RanksFailed, budget_bytes
from benchmarks.distributed.prediction.network import Network as SimulatedNetwork
from benchmarks.distributed.prediction.ranks import Ranks as SimulatedRanks
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.results import Efficiency, Prediction, Results, Training
from benchmarks.distributed.schedule import learning_rate
from benchmarks.distributed.shards import draw_epoch, shard_epoch, shard_validation
from benchmarks.distributed.training import Settings, train
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.checkpoint import load_state
from lmswap.errors import OptionError
from lmswap.ir.machine import Rate
from tests.benchmarks.distributed.faulty_training import Network
from tests.benchmarks.distributed.sums import sum_in_ways
from tests.processes import end, start

pytestmark = [pytest.mark.cpu_only("gloo, on CPUs"), pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
BUDGET_BYTES = 140 * 2**20  # of some 200 MiB


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_epoch_deals_each_image_to_one_rank(size):
    draws = draw_epoch(0, 3, 48)
    shards = [shard_epoch(draws, rank, size, batch=4) for rank in range(size)]
    assert len({len(shard) for shard in shards}) == 1
    assert all(len(batch) == 4 for shard in shards for batch in shard)
    dealt = [draw for shard in shards for batch in shard for draw in batch]
    assert sorted(dealt) == sorted(draws)
    assert sorted(index for index, _ in dealt) == [*range(48)]


def test_samples_that_fill_no_step_are_left_out_of_alternating_epochs():
    left_out = []
    for epoch in (0, 1):
        draws = draw_epoch(0, epoch, 51)
        dealt = [draw for rank in (0, 1) for batch in shard_epoch(draws, rank, 2, 4) for draw in batch]
        assert len({*dealt}) == len(dealt) == 48
        left_out.append({*draws} - {*dealt})
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("num", [1, 7, 24])
def test_ranks_together_validate_each_image_once(num):
    dealt = [index for rank in range(3) for batch in shard_validation(num, rank, 3, 4) for index, _ in batch]
    assert sorted(dealt) == [*range(num)]


def test_steps_are_shared_alike_by_any_number_of_ranks():
    draws = draw_epoch(0, 0, 48)
    alone = [sorted(batch) for batch in shard_epoch(draws, 0, 1, batch=8)]
    pairs = zip(*(shard_epoch(draws, rank, 2, batch=4) for rank in (0, 1)), strict=True)
    assert alone == [sorted(one + other) for one, other in pairs]


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.001), (5, (0.001 + 6.4) / 2), (10, 6.4), (50, 6.4 / 4), (70, 6.4 / 16), (90, 0)]
)
def test_the_learning_rate_warms_up_and_falls_as_a_parabola(step, rate):
    assert learning_rate(step, 90, 64 * 256) == pytest.approx(rate)


def test_a_step_of_lars_is_the_one_computed_by_hand():
    weights = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))  # of length 5
    bias = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    groups = [{"params": [weights], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = Lars(groups, lr=2.0, momentum=0.5)
    weights.grad = torch.tensor([[0.6, 0.8]], dtype=torch.float64)  # of length 1
    bias.grad = torch.tensor([0.25], dtype=torch.float64)
    optimizer.step()
    # g + 0.1 w is 1.5 (0.6, 0.8); the trust ratio η 5 / (1 + 0.1 · 5) takes the 1.5 away again.
    moved = 2 * TRUST * 5 * torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(weights.data, torch.tensor([[3.0, 4.0]], dtype=torch.float64) - moved)
    torch.testing.assert_close(bias.data, torch.tensor([1 - 2 * 0.25], dtype=torch.float64))
    weights.grad = torch.zeros_like(weights)  # of length 0: the trust ratio is 1
    before = weights.data.clone()
    optimizer.step()
    torch.testing.assert_close(weights.data, before - (0.5 * moved + 2 * 0.1 * before))


@pytest.mark.slow
def test_sums_by_nodes_are_the_flat_ones(tmp_path):
    assert end(start(sum_in_ways, 4, str(tmp_path)), seconds=400) == [0] * 4
    for rank in range(4):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [True] * 8


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """24 images to train on and 5 to validate, of two classes."""
    root, random = tmp_path_factory.mktemp("images") / "noise", np.random.default_rng(0)
    for part, num in (("train", 24), ("val", 5)):
        for index in range(num):
            folder = root / part / ("dark" if index % 2 else "light")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(128, size=(64, 64, 3)) + (0 if index % 2 else 127)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return root


def settings_of(images, folder, name, **changes):
    plain = Settings(
        data=images, size=64, batch=4, epochs=2, optimizer="sgd", reduction="flat", dtype="fp32", budget_bytes=None,
        checkpoint=folder / f"{name}.pt", checkpoint_steps=100,
    )  # fmt: skip
    return replace(plain, **changes)


def train_in_ways(rank, world, images, folder):
    """Trains the same plainly, under a budget, with a slow rank, and some steps in fp16 with LARS and sums by nodes."""
    torch.set_num_threads(1)
    folder = Path(folder)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo")

    def slow(classes):
        network = Network(classes)
        network.last.weight.register_hook(lambda _: time.sleep(0.3 * rank))
        return network

    budget = {"budget_bytes": BUDGET_BYTES}
    other = {"optimizer": "lars", "reduction": "hierarchical", "dtype": "fp16", "steps": 4}
    ways = {"plain": ({}, Network), "budget": (budget, Network), "slow": ({}, slow), "other": (other, Network),
            "other, budget": ({**other, **budget}, Network)}  # fmt: skip
    found = {}
    for name, (changes, make) in ways.items():
        point = train(settings_of(Path(images), folder, name, **changes), ranks, lambda _: None, make)
        found[name] = {"bits": point.bits, "swapped_bytes": point.swapped_bytes, "accuracy": point.accuracy}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """What both ranks found, and their folder."""
    folder = tmp_path_factory.mktemp("trained")
    assert end(start(train_in_ways, 2, str(images), str(folder)), seconds=600) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], folder


@pytest.mark.slow
def test_ranks_train_the_same_weights(trained):
    one, other = trained[0]
    assert [way["bits"] for way in one.values()] == [way["bits"] for way in other.values()]
    assert one["plain"]["bits"] != one["other"]["bits"]


@pytest.mark.slow
def test_a_training_under_a_budget_has_the_bits_of_plain_torch(trained):
    for rank in trained[0]:
        assert rank["budget"]["bits"] == rank["plain"]["bits"]
        assert rank["other, budget"]["bits"] == rank["other"]["bits"]
        assert rank["budget"]["swapped_bytes"] > 0


@pytest.mark.slow
def test_a_slow_rank_changes_no_bit(trained):
    for rank in trained[0]:
        assert rank["slow"]["bits"] == rank["plain"]["bits"]


def torchrun(images, folder, fault, *arguments, restarts=0):
    """Two ranks of the training with a fault; swap files go to a folder of their own."""
    swapped = folder / "swapped"
    swapped.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(
            f"--max-restarts={restarts}",
            f"--log-dir={folder}/logs",
            *(
                "-m",
                "tests.benchmarks.distributed.faulty_training",
            ),  # as a module: a script's own folder has other benchmarks
            fault,
            "--data",
            str(images),
            "--size",
            "64",
            "--batch",
            "4",
        ),
        *("--epochs", "2", "--record", str(folder / "results.json"), *arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(swapped)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, cwd=ROOT)
    assert not [*swapped.iterdir()]
    return done


@pytest.mark.slow
def test_ranks_of_which_one_was_killed_go_on_with_the_same_bits(images, trained, tmp_path):
    checkpoint = tmp_path / "killed.pt"
    done = torchrun(
        images, tmp_path, "dies", "--checkpoint", str(checkpoint), "--budget", str(BUDGET_BYTES), restarts=1
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr
    undisturbed, killed = load_state(trained[1] / "budget.pt"), load_state(checkpoint)
    assert killed["step"] == undisturbed["step"] == 6
    assert killed["losses"] == undisturbed["losses"]
    assert killed["model"].keys() == undisturbed["model"].keys()
    assert all(torch.equal(value, undisturbed["model"][name]) for name, value in killed["model"].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no-data", "there is no folder .*-of-rank-1"),
        ("full-disk", "cannot reserve .* bytes.*No space left"),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_its_reason(images, tmp_path, fault, why):
    done = torchrun(images, tmp_path, fault, "--budget", str(BUDGET_BYTES))
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: rank 1: ")]
    assert len(lines) == 2, done.stderr
    assert all(re.search(why, line) for line in lines)
    assert sum(line.endswith("(so rank 0 ends too)") for line in lines) == 1
    assert not (tmp_path / "results.json").exists()


@pytest.fixture
def shown():
    """The commands of the page, in words."""
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def test_the_commands_of_the_page_are_those_of_the_recipes(shown):
    for words in shown:
        match words:
            case ["make", "distributed", *variables]:
                given = dict(variable.split("=", 1) for variable in variables)
                arguments = [given.get("RECIPE", "unet3d"), *given.get("ARGUMENTS", "").split()]
                assert distributed.make_parser().parse_args(arguments).ranks
            case ["python", "-m", "benchmarks.distributed", *arguments]:
                assert distributed.make_parser().parse_args(arguments).ranks
            case ["torchrun", *_, "-m", "benchmarks.distributed.unet3d", "--budget", budget]:
                assert unet3d.make_parser().parse_args(["--budget", budget]).size
            case _:
                pytest.fail(f"nothing tries {words}")


@pytest.mark.slow
def test_one_command_starts_the_ranks_and_writes_their_table(tmp_path, capfd):
    assert distributed.main(["allreduce", "--ranks", "2", "--ranks-per-node", "1", "--output", str(tmp_path)]) == 0
    results = Results.read(tmp_path / "allreduce.json")
    assert {point.way for point in results.reductions} == {
        "flat", "hierarchical", "flat, fused", "hierarchical, fused"
    }  # fmt: skip
    assert all(point.ranks == 2 and point.per_node == 1 for point in results.reductions)
    assert all(point.difference < 1e-6 for point in results.reductions)
    page = (tmp_path / "allreduce.md").read_text(encoding="utf-8")
    assert page in capfd.readouterr().out
    assert page.count("| measured  |") == len(results.reductions)
    assert "| published |" in page


def test_a_table_states_the_basis_of_each_row(tmp_path, capsys):
    measured = Training("64³, fp32", 1, 1, None, 3.0, 2**30, None, "a", None)
    points = [measured, replace(measured, budget_bytes=2**29, bits="b"), replace(measured, ranks=2, step_seconds=3.6)]
    Results("unet3d", None, tuple(points)).write(tmp_path / "measured.json")
    predicted = [replace(point, peak_bytes=None, bits=None, basis="predicted") for point in points]
    Results("unet3d", None, tuple(predicted)).write(tmp_path / "predicted.json")
    files = [str(tmp_path / f"{name}.json") for name in ("measured", "predicted")]
    assert distributed.main(["unet3d", "--output", str(tmp_path), "--from", *files]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row and row[0] == "64³, fp32"]
    assert [row[-1] for row in rows] == 3 * ["measured"] + 3 * ["predicted"]
    assert [row[-2] for row in rows] == ["–", "no", "–", "–", "–", "–"]
    assert rows[2][4:7] == ["410", "1.67", "83.3 %"] == rows[5][4:7]  # 114 steps of 3.6 s, beside 228 of 3 s


class TinyLauncher(Launcher):
    """Starts the recipe with a model that takes no time."""

    def command(self, *arguments):
        found = super().command(*arguments)
        return [
            "tests.benchmarks.distributed.tiny_efficiency" if word == "benchmarks.distributed.efficiency" else word
            for word in found
        ]


@pytest.mark.slow
def test_a_group_of_ranks_measures_what_they_cost_each_other_in_its_turns(tmp_path):
    (results,) = compare_in_turns(TinyLauncher(2), ["unet3d"], [1, 2], ["--turns", "2"])
    alone, found = results.efficiencies
    assert (alone.ranks, alone.budget_bytes) == (1, found.budget_bytes)  # a share of what one takes
    assert found.ranks == 2
    assert len(found.alone_seconds) == len(found.together_seconds) == 2
    least_seconds = SimulatedRanks(2, found.network).all_reduce_seconds(2**10)
    assert 0 < least_seconds <= found.predicted.all_reduce_seconds * (1 + 1e-9)  # summed in another order
    assert 0 <= found.predicted.unhidden_seconds <= found.predicted.extra_seconds * (1 + 1e-9)
    assert [more.ranks for more in found.larger] == [4, 8, 16, 32, 64, 128, 256]
    results.write(tmp_path / "efficiency.json")
    assert Results.read(tmp_path / "efficiency.json") == results


class StandIn(Launcher):
    """Starts what is said to sleep or to fail."""

    def command(self, recipe, ranks, options, record):
        return [*options[:2]]


def test_a_failed_group_is_named_and_remaining_groups_are_ended():
    with pytest.raises(RanksFailed, match=r"efficiency on 2 rank\(s\) did not finish"):
        list(compare_in_turns(StandIn(2), ["net"], [2, 4], ["false", "x"]))
    group = Group(StandIn(2), "efficiency", 2, ["sleep", "600"])
    assert not group.has_ended
    group.__exit__()
    assert group.has_ended


def test_the_efficiency_table_has_measured_and_predicted_figures(tmp_path, capsys):
    network = SimulatedNetwork("pair", 2, 2, "ring", Rate.constant(1e9), None, 0.5, 0.75)
    one = Efficiency("net", 1, True, 2**30, 0, (2.0, 4.0, 8.0), (2.0, 4.0, 8.0), None, Prediction(1, 0.0, 0.0, 0.0))
    two = Efficiency(
        "net", 2, True, 2**30, 0, (5.0, 4.0, 1.0), (6.0, 5.0, 1.1), network, Prediction(2, 0.5, 0.9, 0.8),
        (Prediction(4, 0.75, 1.0, 1.0),),
    )  # fmt: skip
    four = replace(two, ranks=4, has_cores=False, larger=(Prediction(8, 9.0, 9.0, 9.0),))
    Results("efficiency", None, efficiencies=(one, two, four)).write(tmp_path / "efficiency.json")
    given = ["efficiency", "--output", str(tmp_path), "--from", str(tmp_path / "efficiency.json")]
    assert distributed.main(given) == 0
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in capsys.readouterr().out.splitlines()]
    # Twice 1.2, 1.25 and 1.1 times as long: the median of 4 s, and 1.2 of them.
    assert rows[-4:] == [
        ["1", "4.00 s", "4.00 s", "4.00 s", "+0.0 %", "0 s", "–", "0 s", "+0.0 %", "100.0 %", "measured"],
        ["2", "4.00 s", "4.80 s", "4.90 s", "+2.1 %", "500 ms", "50 / 75 %", "800 ms", "+0.0 %", "83.3 %", "measured"],
        ["4, sharing cores", *rows[-3][1:]],
        ["4", "–", "–", "5.00 s", "–", "750 ms", "–", "1.00 s", "–", "80.0 %", "predicted"],
    ]


def test_files_of_two_recipes_make_no_table(tmp_path, capsys):
    for recipe in ("unet3d", "scale"):
        Results(recipe, None).write(tmp_path / f"{recipe}.json")
    files = [str(tmp_path / f"{name}.json") for name in ("unet3d", "scale")]
    assert distributed.main(["unet3d", "--output", str(tmp_path), "--from", *files]) == 2
    assert "one table is of one recipe, not of scale, unet3d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget", "said"), [("half%", "a share of the plain peak (\"50%\"), not 'half%'"), ("0%", "more than 0 bytes")]
)
def test_a_budget_that_is_none_is_refused(budget, said):
    plain = Training("64³, fp32", 1, 1, None, 3.0, 2**30, None, "a", None)
    with pytest.raises((DataError, OptionError), match=re.escape(said)):
        budget_bytes(budget, plain)
    assert budget_bytes("25%", plain) == 2**28
    assert budget_bytes("6MiB", plain) == 6 * 2**20
