"""How does a training survive a kill at any moment? Its files are replaced whole, and one process writes them."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lmswap.bench.unet3d.brats import DataError

State = dict[str, Any]


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Gives ``path`` new content; whoever reads it, also after a crash of the machine, finds the old or the new."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)  # noqa: PTH105 - the name of the atomic call
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
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n", 1)[0]
        raise DataError(f"{path} cannot be read as a training's state ({reason})") from error
    return state


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and keeps other processes that ask for it out; the system ends the hold with the process.

    Raises:
        DataError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process trains in {folder}; wait for it, or name another folder") from error
        yield
