import csv
import errno
import os
import random
import shutil
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.unet3d import checkpoint, predict, train
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.dataset import prepare_data
from benchmarks.unet3d.split import draw_split
from benchmarks.unet3d.train import BEST, CHECKPOINT, LOG, Settings
from tests.benchmarks.unet3d.killed import SMALL, reported, run, start
from tests.benchmarks.unet3d.scans import make_subjects

EPOCHS = 2


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(train, "UNet3d", SMALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("scans")
    make_subjects(root / "scans", 5)
    return prepare_data(root / "scans", 32, root / "cubes", lambda done, total: None)


@pytest.fixture
def settings(tmp_path):
    return Settings(
        size=32, epochs=EPOCHS, seed=0, head="conv", dtype="fp32", device="cpu", swapping=None, output=tmp_path / "out"
    )


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The folder of a training that nothing disturbed, and how often it replaced or synced a file."""
    output, calls = tmp_path_factory.mktemp("whole"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "UNet3d", SMALL)
        for name in ("replace", "fsync"):
            patch.setattr(os, name, reported(getattr(os, name), calls.append))
        run(Settings(32, EPOCHS, 0, "conv", "fp32", "cpu", None, output), data)
    return output, len(calls)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        varying = {"seconds", "peak_bytes"}
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key not in varying)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same_training(output, expected):
    for name in (CHECKPOINT, BEST):
        assert same(checkpoint.load_state(output / name), checkpoint.load_state(expected / name))
    with (output / LOG).open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == [str(epoch + 1) for epoch in range(EPOCHS)]


@pytest.mark.slow
def test_a_training_killed_at_any_write_resumes_with_the_same_bits(settings, data, uninterrupted):
    whole, num_calls = uninterrupted
    chance, deaths, done = random.Random(0), 0, False
    while not done:
        process = start(settings, data, moment=chance.randint(1, num_calls // 2))
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        done, deaths = process.exitcode == 0, deaths + 1
    assert deaths > 1
    assert_same_training(settings.output, whole)


@pytest.mark.slow
def test_a_training_killed_at_random_moments_resumes_with_the_same_bits(settings, data, uninterrupted):
    chance = random.Random(1)
    for _ in range(3):
        process = start(settings, data)
        process.join(timeout=chance.uniform(0.05, 0.6))
        process.kill()
        process.join()
    process = start(settings, data)
    process.join()
    assert process.exitcode == 0
    assert_same_training(settings.output, uninterrupted[0])


def test_a_log_missing_after_a_kill_is_written_by_the_next_start(settings, data, uninterrupted):
    shutil.copytree(uninterrupted[0], settings.output)
    (settings.output / LOG).unlink()
    run(settings, data)
    assert_same_training(settings.output, uninterrupted[0])


class Stopped(Exception):
    pass


def test_the_order_of_events_is_that_of_the_recipe(settings, data):
    events = []
    history = run(replace(settings, epochs=1), data, events.append)
    assert [event["event"] for event in events] == ["start", *["step"] * 4, "validation", "epoch"]
    assert [event["done"] for event in events[1:5]] == [1, 2, 3, 4]
    assert history[0].loss == pytest.approx(sum(event["loss"] for event in events[1:5]) / 4)
    assert history[0].val_loss == events[5]["loss"]
    assert history[0] == events[6]["row"]


def test_training_and_validation_see_only_their_own_subjects(settings, data, monkeypatch):
    seen, load_cube = [], train.CubeFiles.__getitem__
    monkeypatch.setattr(
        train.CubeFiles, "__getitem__",
        lambda self, draw: seen.append(self._paths[draw[0]]) or load_cube(self, draw),
    )  # fmt: skip
    run(replace(settings, epochs=1), data)
    split = draw_split(data.subjects, 0)
    assert set(seen[:4]) == {data.cubes[name] for name in split.training}
    assert seen[4:] == [data.cubes[name] for name in split.validation]


def test_validation_has_no_dropout(settings, data):
    training = train.Training(settings)
    model, batch = training.model.eval(), (torch.randn(1, 4, 32, 32, 32), torch.ones(1, 3, 32, 32, 32))
    assert train._loss(model, batch, "fp32") == train._loss(model, batch, "fp32")
    assert model.train() and train._loss(model, batch, "fp32") != train._loss(model, batch, "fp32")


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_lowest_validation_loss(settings, data, monkeypatch):
    val_losses = iter([-0.3, -0.5, -0.4])
    weights = []

    def loss(model, *_):
        assert not model.training
        weights.append(copied(model))
        return next(val_losses)

    monkeypatch.setattr(train, "_loss", loss)
    run(replace(settings, epochs=3), data)
    best = checkpoint.load_state(settings.output / BEST)
    assert (best["epoch"], best["val_loss"]) == (2, -0.5)
    assert same(best["model"], weights[1]) and not same(weights[1], weights[2])


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_training_ends_early_and_stays_ended(settings, data, monkeypatch):
    monkeypatch.setattr(train, "should_stop", lambda val_losses: len(val_losses) == 2)
    assert len(run(settings, data)) == 2
    events = []
    assert len(run(settings, data, events.append)) == 2
    assert [event["event"] for event in events] == ["start"]


def test_a_plateau_halves_the_rate_in_the_log(settings, data, monkeypatch):
    monkeypatch.setattr(train, "_loss", lambda *_: -0.5)
    monkeypatch.setattr(train.Training, "step", lambda self, *_: self.losses.append(0.0))
    history = run(replace(settings, epochs=12), data)
    assert [epoch.learning_rate for epoch in history] == [5e-4] * 11 + [2.5e-4]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"head": "block"}, {"dtype": "bf16"}])
def test_a_folder_with_another_training_is_refused(settings, data, changed):
    run(replace(settings, epochs=1), data)
    before = (settings.output / CHECKPOINT).read_bytes()
    (name, value) = next(iter(changed.items()))
    with pytest.raises(DataError, match=f"holds a training with {name} .*, not {value}"):
        run(replace(settings, **changed), data)
    assert (settings.output / CHECKPOINT).read_bytes() == before


def test_a_folder_with_other_subjects_is_refused(settings, data):
    run(replace(settings, epochs=1), data)
    with pytest.raises(DataError, match="holds a training with other training subjects"):
        train.train(settings, data, draw_split(data.subjects, 1), lambda event: None)


def test_a_folder_in_use_is_refused(settings, data):
    with checkpoint.held(settings.output), pytest.raises(DataError, match="another process trains in"):
        run(settings, data)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_checkpoint_that_cannot_be_read_is_named(settings, data, content):
    run(replace(settings, epochs=1), data)
    path = settings.output / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(DataError, match=r"checkpoint\.pt cannot be read as a training's state"):
        run(settings, data)


@pytest.mark.parametrize("harmed", [b"model", b"history", b"little", b"validation subjects"])
def test_a_checkpoint_with_damaged_bytes_is_named(tmp_path, harmed):
    torch.save({"model": {"weight": torch.zeros(3)}, "history": [1.5], "validation subjects": ["a"]}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    assert harmed in data
    (tmp_path / "x.pt").write_bytes(data.replace(harmed, b"\xff" * len(harmed)))
    with pytest.raises(DataError, match=r"x\.pt cannot be read as a training's state"):
        checkpoint.load_state(tmp_path / "x.pt")


def test_a_state_that_is_not_whole_is_named(settings, data):
    run(replace(settings, epochs=1), data)
    for name in (CHECKPOINT, BEST):
        whole = checkpoint.load_state(settings.output / name)
        for part in ({**whole, "model": {}}, {key: value for key, value in whole.items() if key != "model"}, [whole]):
            torch.save(part, settings.output / name)
            with pytest.raises(DataError, match=rf"{name} cannot be read as a training's state"):
                run(settings, data) if name == CHECKPOINT else predict.load_trained(settings.output, "cpu")


def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"model": partial(print, "run")}, tmp_path / "bad.pt")
    with pytest.raises(DataError, match=r"bad\.pt cannot be read"):
        checkpoint.load_state(tmp_path / "bad.pt")


def test_a_full_disk_leaves_the_last_checkpoint(settings, data, monkeypatch):
    run(replace(settings, epochs=1), data)
    before = (settings.output / CHECKPOINT).read_bytes()

    save = torch.save

    def full_disk(state, file):
        class Full:
            """Takes a part, then refuses as the system does; torch makes another error of that."""

            def write(self, data):
                if file.tell() > 100_000:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return file.write(data)

            def flush(self):
                file.flush()

        save(state, Full())

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(DataError, match=r"\.pt cannot be written \(No space left on device\)"):
        run(settings, data)
    assert (settings.output / CHECKPOINT).read_bytes() == before
    assert not list(settings.output.glob("*.unfinished"))


@pytest.mark.slow
def test_a_swapped_training_stopped_in_mid_epoch_resumes_with_its_bits(settings, data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_loss", lambda *_: -0.5)  # swapped predictions are tested with evaluate
    swapped = replace(settings, swapping={"budget": "1GiB", "policy": "swap_all"}, epochs=1)

    def stop(event):
        if event["event"] == "step" and event["done"] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run(swapped, data, stop)
    resumed = []
    run(swapped, data, resumed.append)
    assert resumed[1]["done"] == 2  # the second step had been reported, but not been saved
    run(replace(swapped, output=tmp_path / "whole"), data)
    for name in (CHECKPOINT, BEST):
        assert same(*(checkpoint.load_state(folder / name) for folder in (settings.output, tmp_path / "whole")))
