"""Trains the network for real, with the full recipe of the case study, in steps that a kill can interrupt anywhere.

Order, positions and dropout of each step follow from the seed and the step's number alone. So a training that was
killed and goes on from its checkpoint has the same bits as one that was not, wherever torch repeats its own.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lmswap
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.checkpoint import State, held, load_state, reading, replace_file, save_state
from benchmarks.unet3d.dataset import DataSet
from benchmarks.unet3d.loader import Batch, CubeFiles, EpochSampler, training_loader, validation_loader
from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.memory import CudaMeter, Meter, ResidentMeter, import_lmswap
from benchmarks.unet3d.network import Head, UNet3d
from benchmarks.unet3d.preprocess import Normalization, measure_normalization
from benchmarks.unet3d.recipe import Dtype, autocast, make_optimizer, make_schedule, should_stop, take_step
from benchmarks.unet3d.split import Split

SCHEMA = "lmswap.unet3d.training/1"
CHECKPOINT, BEST, LOG = "checkpoint.pt", "best.pt", "log.csv"
CHECKPOINT_SECONDS = 300.0  # within an epoch: at most so much work is lost; the file has 99 MB

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """What to train. ``swapping`` are arguments of `lmswap.enable`; None is plain torch."""

    size: int
    epochs: int
    seed: int
    head: Head
    dtype: Dtype
    device: str
    swapping: Mapping[str, Any] | None
    output: Path


@dataclass(frozen=True)
class Epoch:
    """A row of the log. ``peak_bytes`` is as `memory` defines it, since the process began; the losses are means."""

    epoch: int
    seconds: float
    loss: float
    val_loss: float
    learning_rate: float
    peak_bytes: int


class Training:
    """A network in training, and how far it is: all that a checkpoint holds."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self._seed, self._dtype = settings.seed, settings.dtype
        self.model: nn.Module = UNet3d(head=settings.head).to(settings.device)
        self._optimizer = make_optimizer(self.model.parameters())
        self._schedule = make_schedule(self._optimizer)
        self.history: list[Epoch] = []
        self.losses: list[float] = []  # of the epoch under way
        self.seconds = 0.0  # that it has taken so far

    @property
    def val_losses(self) -> list[float]:
        """Validation loss of each completed epoch."""
        return [epoch.val_loss for epoch in self.history]

    def step(self, images: Tensor, truth: Tensor) -> None:
        """One step of the epoch under way."""
        torch.manual_seed(_step_seed(self._seed, len(self.history), len(self.losses)))
        self.losses.append(take_step(self.model, self._optimizer, images, truth, self._dtype).item())

    def end_epoch(self, val_loss: float, peak_bytes: int) -> Epoch:
        """Closes the epoch under way; its validation loss drives the learning rate."""
        epoch = Epoch(
            epoch=len(self.history) + 1,
            seconds=self.seconds,
            loss=sum(self.losses) / len(self.losses),
            val_loss=val_loss,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            peak_bytes=peak_bytes,
        )
        self.history.append(epoch)
        self.losses, self.seconds = [], 0.0
        self._schedule.step(val_loss)
        return epoch

    def state(self) -> State:
        """The state from which training continues bitwise identically."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "history": [asdict(epoch) for epoch in self.history],
            "losses": self.losses,
            "seconds": self.seconds,
        }

    def load(self, state: State) -> None:
        """Restores what `state` returned."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.losses, self.seconds = list(state["losses"]), state["seconds"]


def train(
    settings: Settings,
    data: DataSet,
    split: Split,
    on_event: OnEvent,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[Epoch]:
    """Train until the epochs are done or the validation loss stops falling; resumes where an earlier call ended.

    Args:
        settings: of the training; its folder ``output`` holds the checkpoint, the weights of the epoch with the lowest
            validation loss, and the log.
        data: the cubes.
        split: the names of the subjects for training and for validation.
        on_event: called with a dictionary for each "start", "step", "validation" and "epoch", its "event".
        checkpoint_seconds: the time between two checkpoints within an epoch.

    Returns:
        All epochs so far, those of earlier calls included.

    Raises:
        DataError: the folder holds another training, or is in use.
        LmswapError: from `lmswap.enable` and the steps under it.
    """
    with held(settings.output):
        return _Run(settings, data, split, on_event, checkpoint_seconds).run()


class _Run:
    """One process's part of a training."""

    def __init__(
        self, settings: Settings, data: DataSet, split: Split, on_event: OnEvent, checkpoint_seconds: float
    ) -> None:
        self._settings, self._on_event, self._checkpoint_seconds = settings, on_event, checkpoint_seconds
        self._device = torch.device(settings.device)
        normalization = measure_normalization(list(data.cubes.values()))  # of all subjects, as in the case study
        self._identity = _identify(settings, data, split, normalization)
        self._training = Training(settings)
        if (settings.output / CHECKPOINT).exists():
            state = load_state(settings.output / CHECKPOINT)
            _require_same(state, self._identity, settings.output)
            with reading(settings.output / CHECKPOINT):
                self._training.load(state)
        cubes = {
            part: CubeFiles([data.cubes[name] for name in names], normalization) for part, names in vars(split).items()
        }
        self._sampler = EpochSampler(settings.seed, len(split.training))
        on_cuda = self._device.type == "cuda"
        self._training_loader = training_loader(
            cubes["training"], self._sampler, workers=int(on_cuda), pin_memory=on_cuda
        )
        self._validation_loader = validation_loader(cubes["validation"], pin_memory=on_cuda)

    def run(self) -> list[Epoch]:
        training, settings = self._training, self._settings
        self._write_log()  # a kill may have come between the checkpoint and the log
        if settings.swapping is not None:
            import_lmswap()
        meter: Meter = CudaMeter() if self._device.type == "cuda" else ResidentMeter()
        self._on_event({"event": "start", "history": list(training.history), "done": len(training.losses)})
        if settings.swapping is not None:
            lmswap.enable(training.model, **settings.swapping)
        try:
            while len(training.history) < settings.epochs and not should_stop(training.val_losses):
                self._run_epoch(meter)
        finally:
            lmswap.disable(training.model)
        return training.history

    def _run_epoch(self, meter: Meter) -> None:
        training = self._training
        earlier_seconds, start, saved = training.seconds, time.monotonic(), time.monotonic()
        training.model.train()
        self._sampler.start(len(training.history), len(training.losses))
        for images, truth in self._training_loader:
            training.step(images.to(self._device), truth.to(self._device))
            training.seconds = earlier_seconds + time.monotonic() - start
            self._report(meter, "step", done=len(training.losses), loss=training.losses[-1])
            if time.monotonic() - saved >= self._checkpoint_seconds:
                self._save()
                saved = time.monotonic()
        val_loss = self._validate(meter)
        training.seconds = earlier_seconds + time.monotonic() - start
        is_best = val_loss < min(training.val_losses, default=math.inf)
        epoch = training.end_epoch(val_loss, meter.peak_bytes())
        if is_best:  # before the checkpoint: a kill in between repeats the epoch, and so this
            save_state(self._settings.output / BEST, self._identity | _best_state(training))
        self._save()
        self._write_log()
        self._on_event({"event": "epoch", "row": epoch})

    def _validate(self, meter: Meter) -> float:
        model, losses = self._training.model, []
        model.eval()
        for images, truth in self._validation_loader:
            losses.append(_loss(model, (images.to(self._device), truth.to(self._device)), self._settings.dtype))
            self._report(meter, "validation", done=len(losses), loss=losses[-1])
        return sum(losses) / len(losses)

    def _report(self, meter: Meter, event: str, **what: object) -> None:
        self._on_event({"event": event, "peak_bytes": meter.peak_bytes(), **what})

    def _save(self) -> None:
        save_state(self._settings.output / CHECKPOINT, self._identity | self._training.state())

    def _write_log(self) -> None:
        text = io.StringIO()
        rows = csv.DictWriter(text, [field.name for field in fields(Epoch)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(map(asdict, self._training.history))
        replace_file(self._settings.output / LOG, lambda file: file.write(text.getvalue().encode()))


@torch.no_grad()
def _loss(model: nn.Module, batch: Batch, dtype: Dtype) -> float:
    images, truth = batch
    with autocast(images.device, dtype):
        probability = model(images)
    return weighted_dice_loss(probability, truth).item()


def _step_seed(seed: int, epoch: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, epoch, step]).generate_state(1, np.uint64)[0] >> 1)


def _identify(settings: Settings, data: DataSet, split: Split, normalization: Normalization) -> State:
    """The settings and data that determine the bits of a training, and what a prediction with its weights needs."""
    return {
        "schema": SCHEMA,
        "size": settings.size,
        "seed": settings.seed,
        "head": settings.head,
        "dtype": settings.dtype,
        "data": data.kind,
        "training subjects": list(split.training),
        "validation subjects": list(split.validation),
        "means": normalization.means.tolist(),
        "stds": normalization.stds.tolist(),
    }


def _best_state(training: Training) -> State:
    return {"model": training.model.state_dict(), **asdict(training.history[-1])}


def _require_same(state: State, identity: State, output: Path) -> None:
    for name, value in identity.items():
        if state.get(name) != value:
            what = f"other {name}" if isinstance(value, list) else f"{name} {state.get(name)}, not {value}"
            raise DataError(
                f"{output} holds a training with {what}; "
                "go on with what it was begun with, or name another output folder"
            )
