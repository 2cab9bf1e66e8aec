"""A training in a process of its own that is killed, or kills itself; small, as each process imports it again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.unet3d import train
from benchmarks.unet3d.dataset import DataSet
from benchmarks.unet3d.network import UNet3d
from benchmarks.unet3d.split import draw_split

SMALL = partial(UNet3d, base_filters=2)  # a kill needs no large network

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def run(settings: train.Settings, data: DataSet, on_event: train.OnEvent = lambda _event: None) -> list[train.Epoch]:
    """Trains with a checkpoint after every step."""
    return train.train(settings, data, draw_split(data.subjects, 0), on_event, checkpoint_seconds=0)


def start(settings: train.Settings, data: DataSet, moment: int = 0) -> multiprocessing.process.BaseProcess:
    """Starts a process that kills itself at the given call of `os.replace` or `os.fsync`, before it does anything."""
    process = _processes.Process(target=_train_and_die, args=(settings, data, moment))
    process.start()
    return process


def _train_and_die(settings: train.Settings, data: DataSet, moment: int) -> None:
    torch.set_num_threads(1)
    train.UNet3d = SMALL
    calls: list[str] = []

    def before(name: str) -> None:
        calls.append(name)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("replace", "fsync"):
        setattr(os, name, reported(getattr(os, name), before))
    run(settings, data)


def reported(call: Callable[..., object], before: Callable[[str], object]) -> Callable[..., object]:
    """``call``, with its name passed to ``before`` first."""

    def wrapped(*arguments: object) -> object:
        before(call.__name__)
        return call(*arguments)

    return wrapped
