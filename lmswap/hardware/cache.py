"""Results of earlier processes: JSON files, each named by the hash of its key.

Only this user's own files in a directory of this user's are read, and never through a symbolic link: a plan that others
could write would decide what is kept and what is swapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lmswap.ir.json_io import as_json

_log = logging.getLogger(__name__)

_MAX_BYTES = 256 * 2**20  # of files of one kind; a plan takes some 0.1 to 5 MiB
_WRITABLE_BY_OTHERS = 0o022  # by a group, too: its members may change


@dataclass(frozen=True)
class CacheFile:
    """One file. It contains its key, so that hash collisions are detected."""

    path: Path | None  # None: nothing is cached
    key: dict[str, Any]

    @staticmethod
    def locate(kind: str, key: Mapping[str, Any]) -> CacheFile:
        """The file of ``kind`` for ``key``, of JSON types, which holds all that the contents depend on."""
        directory = cache_directory()
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return CacheFile(directory / f"{kind}-{digest}.json" if directory else None, dict(key))

    def read(self) -> dict[str, Any] | None:
        """The data last written; None if there is none.

        Raises:
            ValueError: the file is damaged, has another key, or others may have written it.
            OSError: it cannot be read, or is a symbolic link.
        """
        try:
            data = json.loads(_read_if_owned(self.path)) if self.path else None
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        if data is None:
            return None
        if not isinstance(data, dict) or data.pop("key", None) != self.key:
            raise ValueError("it has another key")
        return data

    def write(self, data: Mapping[str, Any]) -> None:
        """Replaces the file's contents by ``data``, atomically; logs a warning on failure."""
        if self.path is None:
            return
        try:
            _make_private(self.path.parent)
            _check_ownership(self.path.parent)
            _replace(self.path, as_json({**data, "key": self.key}))
            _remove_oldest(self.path)
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be written, the next process will measure and plan afresh: %s", self.path, error)


def _remove_oldest(written: Path) -> None:
    """Removes the oldest files of the kind of ``written`` beyond `_MAX_BYTES`."""
    kept_bytes, kind = 0, written.name.rpartition("-")[0]
    files = [(path, path.stat()) for path in written.parent.glob(f"{kind}-*.json")]
    for path, status in sorted(files, key=lambda file: (file[0] != written, -file[1].st_mtime_ns)):
        kept_bytes += status.st_size
        if kept_bytes > _MAX_BYTES and path != written:
            path.unlink(missing_ok=True)


def _read_if_owned(path: Path) -> str:
    _check_ownership(path.parent)
    # O_NONBLOCK: opening a pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
            raise ValueError("it is not a file that only this user may write")
        return file.read()


def _check_ownership(directory: Path) -> None:
    """Raises ValueError if others may write in the directory, or own it or a link to it."""
    for status in (directory.lstat(), directory.stat()):
        if status.st_uid != os.geteuid():
            raise ValueError(f"'{directory}' belongs to another user ({status.st_uid})")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise ValueError(f"others may write in '{directory}': its mode is {status.st_mode & 0o7777:o}; chmod 700 it")


def _make_private(directory: Path) -> None:
    """Creates ``directory`` and missing parents with mode 700, for any umask."""
    if not directory.is_dir():
        _make_private(directory.parent)  # mkdir(parents=True) would make these with the mode that the umask leaves
        directory.mkdir(mode=0o700, exist_ok=True)


def _replace(path: Path, text: str) -> None:
    """Atomically replaces ``path``, even if it is a link, by a new file that only this user can access."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def cache_directory() -> Path | None:
    """The cache directory: $LMSWAP_CACHE_DIR, else $XDG_CACHE_HOME/lmswap, by default ~/.cache/lmswap.

    None where $LMSWAP_CACHE_DIR is set and empty, or this user has no home: then nothing is kept or read.
    """
    chosen = os.environ.get("LMSWAP_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmswap"
    except RuntimeError:  # neither $HOME nor an entry in passwd, as in a container with its user id
        _warn_no_home()
        return None


def remembers() -> bool:
    """Whether results are cached for the next process."""
    return cache_directory() is not None


@cache
def _warn_no_home() -> None:
    _log.warning(
        "user %d has no home: the next process will measure and plan afresh; set LMSWAP_CACHE_DIR", os.geteuid()
    )
