"""The directory of the disk tier: on a real disk with enough free space, never on a memory file system."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lmswap.errors import TierError
from lmswap.files import is_path

_libc = ctypes.CDLL(None)

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_RAM_DISK = re.compile(r"/dev/z?ram\d+")


@dataclass(frozen=True)
class Directory:
    """A directory with the file system that holds it. ``source`` is its device, "/dev/nvme0n1p2"."""

    path: str
    filesystem: str
    source: str
    total_bytes: int
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether its files are in main memory, by its names, so that swapping to it would free nothing."""
        return self.filesystem in _IN_MEMORY or _RAM_DISK.fullmatch(self.source) is not None


def describe_directory(path: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> Directory:
    """The directory ``path`` with its file system.

    Raises:
        TierError: it is not a directory.
    """
    if not Path(path).is_dir():
        raise TierError(f"disk_directory '{path}' is not a directory; make it, or name another")
    filesystem, source = _mount_of(Path(path).stat().st_dev, os.path.realpath(path), mountinfo)
    usage = shutil.disk_usage(path)
    return Directory(path, filesystem, source, usage.total, usage.free)


def swap_directory(directory: str | None = None) -> str:
    """The directory for swap files: ``directory``, else $LMSWAP_DISK_DIRECTORY, else the first suitable default.

    Defaults are the system's temporary directory (TMPDIR, usually /tmp) and /var/tmp, on disk where /tmp is not.

    Raises:
        TierError: not a directory, not writable, open to all users, or in memory; the message says which, for each
            directory tried.
    """
    refusals = []
    directory = directory or os.environ.get("LMSWAP_DISK_DIRECTORY")
    for path in [directory] if directory else list(dict.fromkeys([_temporary_directory(), "/var/tmp"])):
        refusal = _refusal(path)
        if refusal is None:
            return path
        refusals.append(refusal)
    raise TierError(
        f"no directory for swap files: {'; '.join(refusals)}. Name one on a disk by disk_directory=... or "
        "LMSWAP_DISK_DIRECTORY"
    )


def _temporary_directory() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:  # a machine that is mounted read-only
        raise TierError(
            f"no directory for swap files: {error.strerror}. Name one on a disk by disk_directory=... or "
            "LMSWAP_DISK_DIRECTORY"
        ) from error


def _refusal(path: str) -> str | None:
    """Why ``path`` cannot hold swap files; None if it can."""
    if not is_path(path):
        return f"'{path}' is not a path of UTF-8"
    try:
        return _obstacle(path)
    except OSError as error:
        return f"'{path}' cannot be used: {error.strerror}"


def _obstacle(path: str) -> str | None:
    if not Path(path).is_dir():
        return f"'{path}' is not a directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"'{path}' is not writable"
    if _is_world_writable(path):
        return f"'{path}' is open to all users, who may change what is in it (chmod 700 or 1777 it)"
    found = describe_directory(path)
    if found.is_memory or _keeps_page_cache(path):
        return f"'{path}' is memory, not a disk ({found.filesystem})"
    return None


def _is_world_writable(path: str) -> bool:
    """Whether all users may change its files; the engine rejects that too, here another directory is tried."""
    mode = Path(path).stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _keeps_page_cache(path: str) -> bool:
    """Whether a synced file remains in the page cache despite POSIX_FADV_DONTNEED, so that no disk holds its bytes.

    An overlay's name does not identify the file system below, which a container cannot look up. The file's second page
    is never written: where mincore reports it resident, as sandboxes do for all pages, the result is unknown (False).
    """
    page_bytes = mmap.PAGESIZE
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        file.write(bytes(page_bytes))
        file.truncate(2 * page_bytes)
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 2 * page_bytes) as mapped:
            start, resident = ctypes.c_char.from_buffer(mapped), (ctypes.c_ubyte * 2)()
            _libc.mincore(ctypes.byref(start), ctypes.c_size_t(2 * page_bytes), resident)
            del start  # it would keep the mapping
    return [flags & 1 for flags in resident] == [1, 0]


def _mount_of(device: int, path: str, mountinfo: Path) -> tuple[str, str]:
    """(file system, source) of the mount that holds ``path``: by device number, else (btrfs, overlay) by path."""
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    best, best_rank = ("unknown", "unknown"), (False, -1)
    for line in mountinfo.read_bytes().split(b"\n")[:-1]:  # names are bytes, of any encoding
        mount, _, described = line.partition(b" - ")
        fields, (filesystem, source, *_) = mount.split(b" "), described.split(b" ")
        point = _unescape(fields[4])
        if Path(path).is_relative_to(point):
            rank = (fields[2] == number, len(point))
            if rank >= best_rank:  # of two on one point the later one is on top
                best, best_rank = (_unescape(filesystem), _unescape(source)), rank
    return best


def _unescape(field: bytes) -> str:
    """A name out of the kernel's tables, which write a space, and what else would end a field, in octal."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))
