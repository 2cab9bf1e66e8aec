"""Writes files whole or not at all; errors state the file and the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from benchmarks.unet3d.brats import DataError
from lmswap.errors import without_path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says of what fails inside that ``path`` could not be written.

    Raises:
        DataError: the system refused, as where the disk is full or the folder may not be written to.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        folder = f": {refusal.filename}" if refusal.filename in map(str, path.parents) else ""
        raise DataError(f"{path} cannot be written ({without_path(refusal)}{folder})") from error


@contextmanager
def replacing(path: Path, unfinished: Path) -> Iterator[BinaryIO]:
    """Gives the file ``unfinished``, which takes the place of ``path`` once all is written, and is removed if it fails.

    Who reads ``path`` meanwhile finds a whole file: the old one, or none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, path)  # noqa: PTH105 - the name of the atomic call
    except BaseException:
        unfinished.unlink(missing_ok=True)  # a full disk must not keep an unfinished file
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text whole or not at all; if it cannot be, what was there before is still there.

    Raises:
        DataError: the system refused.
    """
    with writing(path), replacing(path, path.with_name(f"{path.name}.unfinished")) as file:
        file.write(text.encode())


def _refusal(error: BaseException | None) -> OSError | None:
    """The system's own error; torch's and numpy's writers raise another one while they close what it left half."""
    seen = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__context__
    return None
