import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.unet3d import run as run_module
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.measured import Run
from benchmarks.unet3d.memory import MeasurementError
from benchmarks.unet3d.network import UNet3d
from benchmarks.unet3d.preprocess import load_cubes, prepare_cube
from benchmarks.unet3d.run import Trainer, run
from lmswap import planner
from lmswap.ir.timeline import Lane
from tests.benchmarks.unet3d.scans import make_subject


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    root = tmp_path_factory.mktemp("scans")
    cubes = tuple(str(prepare_cube(make_subject(root, f"case_{n}", n), 32, root / "cache")) for n in (1, 2))
    return Configuration(
        size=32, steps=2, policy=None, budget_bytes=None, cap_bytes=None, head="conv", dtype="fp32", device="cpu",
        seed=0, cubes=cubes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def events():
    return []


@pytest.fixture(scope="module")
def plain_run(plain, events):
    return run(plain, events.append)


@pytest.mark.slow
def test_the_same_configuration_gives_the_same_bits(plain, plain_run):
    again = run(plain, lambda _: None)
    assert again.loss_bits == plain_run.loss_bits
    assert again.weights_sha256 == plain_run.weights_sha256
    other = run(replace(plain, seed=1, steps=1), lambda _: None)
    assert other.loss_bits[0] != plain_run.loss_bits[0]
    assert other.weights_sha256 != plain_run.weights_sha256


def test_a_run_reports_its_steps_and_measures_itself(plain_run, events):
    result = plain_run
    steps = [event for event in events if event["event"] == "step"]
    assert [(event["step"], event["loss"]) for event in steps] == list(enumerate(result.losses, start=1))
    assert len(result.step_seconds) == 2 and min(result.step_seconds) > 0
    assert result.tensor_peak_bytes > 1500 * 32**3  # saved for backward alone: 1798 bytes a voxel
    assert result.memory == tuple(sorted(result.memory))
    assert result.swapping is None


def test_modules_are_loaded_before_memory_is_measured(plain, monkeypatch):
    loaded = []
    monkeypatch.setattr(planner, "import_search", lambda: loaded.append("the search"))

    class Meter:
        def __init__(self):
            raise MeasurementError(", ".join(loaded))

    monkeypatch.setattr(run_module, "ResidentMeter", Meter)
    with pytest.raises(MeasurementError, match="the search"):
        run(replace(plain, policy="auto", budget_bytes=2**30), lambda _: None)


@pytest.mark.slow
def test_timed_steps_begin_when_the_start_is_given(plain):
    happened = []
    configuration = replace(plain, steps=3, warm_up_steps=2, counts_tensors=False)
    result = run(configuration, lambda event: happened.append(event["event"]), lambda: happened.append("start"))
    assert [event for event in happened if event in ("step", "ready", "start")] == [
        "step", "step", "ready", "start", "step",
    ]  # fmt: skip
    assert result.timed_seconds == result.step_seconds[2:] and result.seconds_per_step == result.step_seconds[2]
    assert result.tensor_peak_bytes is None


@pytest.mark.slow
def test_steps_that_take_turns_wait_each(plain):
    happened = []
    configuration = replace(
        plain, steps=4, warm_up_steps=2, counts_tensors=False, takes_turns=True, policy="none", budget_bytes=None
    )
    result = run(configuration, lambda event: happened.append(event["event"]), lambda: happened.append("start"))
    assert [event for event in happened if event in ("step", "ready", "start")] == [
        "step", "step", "ready", "start", "step", "ready", "start", "step",
    ]  # fmt: skip
    assert len(result.timed_seconds) == 2 and result.figures.num_steps == 1


def test_bits_are_those_of_the_float32_loss(plain_run):
    for loss, bits in zip(plain_run.losses, plain_run.loss_bits, strict=True):
        assert torch.tensor(loss).view(torch.int32).item() & 0xFFFFFFFF == int(bits, 16)


@pytest.mark.slow
def test_bf16_trains_and_differs_from_fp32(plain, plain_run):
    result = run(replace(plain, dtype="bf16"), lambda _: None)
    assert result.loss_bits != plain_run.loss_bits
    assert result.losses[0] == pytest.approx(plain_run.losses[0], abs=0.02)
    assert result.tensor_peak_bytes < plain_run.tensor_peak_bytes


@pytest.mark.slow
def test_the_block_head_trains(plain, plain_run):
    assert run(replace(plain, head="block", steps=1), lambda _: None).loss_bits[0] != plain_run.loss_bits[0]


@pytest.mark.slow
def test_subjects_come_in_turn_and_an_epoch_drives_the_schedule(plain):
    torch.manual_seed(0)
    seen, epochs = [], []
    model = UNet3d()
    trainer = Trainer(model, load_cubes([Path(path) for path in plain.cubes]), plain)
    model.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0].clone()))
    trainer._schedule.step = epochs.append
    losses = [trainer.step().item() for _ in range(4)]
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])
    assert epochs == [pytest.approx(sum(losses[:2]) / 2), pytest.approx(sum(losses[2:]) / 2)]


def test_configurations_and_runs_survive_json(plain, plain_run):
    assert Configuration.from_json(json.dumps(asdict(plain))) == plain
    assert Run.from_fields(json.loads(json.dumps(asdict(plain_run)))) == plain_run


@pytest.mark.slow
def test_swapped_runs_have_the_bits_of_unswapped_graphs(plain):
    unswapped = run(replace(plain, steps=1, policy="none"), lambda _: None)
    swapped = run(replace(plain, steps=1, policy="swap_all"), lambda _: None)
    assert swapped.loss_bits == unswapped.loss_bits
    assert swapped.weights_sha256 == unswapped.weights_sha256
    assert unswapped.swapping.out_bytes == unswapped.swapping.in_bytes == 0
    assert swapped.swapping.out_bytes > 10 * 2**20
    moved = {lane: sum(span.nbytes for span in swapped.swapping.spans if span.lane == lane) for lane in ("out", "in")}
    assert moved == {"out": swapped.swapping.out_bytes, "in": swapped.swapping.in_bytes}
    assert swapped.tensor_peak_bytes < unswapped.tensor_peak_bytes
    assert swapped.swapping.saved_bytes == unswapped.swapping.saved_bytes > 1500 * 32**3
    timeline = swapped.swapping.timeline
    assert 0 < swapped.swapping.forward_seconds < timeline.lane_seconds(Lane.COMPUTE) < timeline.seconds
    assert Run.from_fields(json.loads(json.dumps(asdict(swapped)))) == swapped


def test_a_run_ends_quietly_when_its_starter_has_ended(monkeypatch, tmp_path, plain):
    def train(_configuration, _emit, wait_for_start):
        wait_for_start()
        pytest.fail("it trained")

    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(asdict(plain)))
    (events, child_events), (start, start_end) = os.pipe(), os.pipe()
    os.close(start_end)
    monkeypatch.setattr(run_module, "run", train)
    monkeypatch.setattr("sys.argv", ["run", str(settings), "--start", str(start), "--events", str(child_events)])
    with os.fdopen(events), pytest.raises(SystemExit) as end:
        run_module.main()
    assert not end.value.code
