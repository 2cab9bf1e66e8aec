"""Checkpoints that survive a kill at any moment: files are replaced whole, by one process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.files import replacing, writing

State = dict[str, Any]


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the content of ``path``; a reader, also after a crash of the machine, finds the old or the new one.

    Raises:
        DataError: it cannot be written; the old content is still there.
    """
    with writing(path):
        with replacing(path, path.with_name(f"{path.name}.unfinished")) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name lasts only once its folder is on the disk
        finally:
            os.close(folder)


def save_state(path: Path, state: State) -> None:
    """Saves tensors, numbers, strings, lists and dictionaries of them."""
    replace_file(path, lambda file: torch.save(state, file))


def load_state(path: Path) -> State:
    """Loads what `save_state` saved, tensors to the CPU; runs no code from the file.

    Raises:
        DataError: it cannot be read, or holds more than such values.
    """
    with reading(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
        return state


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Says of what fails inside that ``path`` holds no training's state.

    Raises:
        DataError: something failed.
    """
    try:
        yield
    except Exception as error:  # damaged bytes lead torch's reader to errors of any class
        reason = (str(error) or type(error).__name__).split("\n", 1)[0]
        raise DataError(f"{path} cannot be read as a training's state ({reason})") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and keeps other processes that ask for it out; the system ends the hold with the process.

    Raises:
        DataError: another process holds it, or it cannot be written to.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process trains in {folder}; wait for it, or name another folder") from error
        yield
