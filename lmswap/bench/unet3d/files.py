"""How is it said that a file cannot be written? With its name and the reason, also where the system gives no name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmswap.bench.unet3d.brats import DataError
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


def _refusal(error: BaseException | None) -> OSError | None:
    """The system's own error; torch's and numpy's writers raise another one while they close what it left half."""
    seen = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__context__
    return None
