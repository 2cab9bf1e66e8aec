"""Reads the files that a user names as text: plans, programs, machines, networks and profiles; refuses all else."""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import stat
import zlib
from pathlib import Path

_MAX_BYTES = 2**30  # of text; parsed JSON takes ten times as much
# Programs and profilers' JSON compress by 12 to 17 times; a file that exceeds this limit is none of them. The format
# itself allows up to 1032.
_MAX_EXPANSION = 100
_PIECE_BYTES = 2**20
_LIMIT = "no more than 1.00 GiB of text are read"
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # stands for a byte that is not UTF-8, see os.fsdecode
_GZIP = b"\x1f\x8b"

_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFDIR: "directory"}


def is_path(path: object) -> bool:
    """Whether ``path`` can be passed to the engine, too, which takes UTF-8; file names may be other bytes."""
    return isinstance(path, str) and path != "" and "\0" not in path and _SURROGATE.search(path) is None


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a regular file; a FIFO, a terminal or a device might block or never end.

    Raises:
        OSError: there is no such file, or it is of another kind.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path cannot hold NUL")
    kind = stat.S_IFMT(Path(path).stat().st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is a {_KINDS.get(kind, 'device')}, not a file")
    # O_NONBLOCK: some files of the kernel block, and a FIFO may have replaced this one meanwhile.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_text(path: str | Path) -> str:
    """Return the text of a regular file, decompressed if it is a gzip file, whatever its name.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than 1 GiB.
        ValueError: it is not UTF-8, a damaged gzip file, or one that expands beyond any text of lmswap.
    """
    with open_file(path) as file:
        if (nbytes := os.fstat(file.fileno()).st_size) > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has {nbytes / 2**30:.2f} GiB, and {_LIMIT}")
        content = _read(file, _MAX_BYTES)
        if content is None:  # files of the kernel state no length
            raise OSError(errno.EFBIG, f"it does not end, and {_LIMIT}")
    return (_unpack(content) if content.startswith(_GZIP) else content).decode()


def _read(file: io.BufferedIOBase, max_bytes: int) -> bytearray | None:
    """Return the content of ``file``; None if that is more than ``max_bytes``."""
    content = bytearray()
    while piece := file.read(_PIECE_BYTES):
        content += piece
        if len(content) > max_bytes:
            return None
    return content


def _unpack(packed: bytearray) -> bytearray:
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            content = _read(file, min(_MAX_BYTES, _MAX_EXPANSION * len(packed)))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it is a damaged gzip file: {error}") from error
    if content is None:
        raise ValueError(f"it unpacks to more than {_MAX_EXPANSION} times its {len(packed)} bytes, or than 1 GiB")
    return content
