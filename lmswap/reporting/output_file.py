"""Files that the user names for results: checked before the work whose results they get."""

from __future__ import annotations

from pathlib import Path

from lmswap.errors import OptionError


def check_can_write(path: str | Path, *endings: str) -> Path:
    """Return ``path``, whose name must have one of ``endings`` if there are any.

    Raises:
        OptionError: it has another ending, or its folder does not exist.
    """
    path = Path(path)
    if endings and path.suffix.lower() not in endings:
        raise OptionError(f"cannot write '{path}': the name must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise OptionError(f"cannot write '{path}': folder '{path.parent}' does not exist")
    return path
