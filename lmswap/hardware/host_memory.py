"""Main memory as the kernel counts it: resident bytes of this process, and bytes available within its cgroups.

Resident memory is the budget of a CPU model; available memory bounds what can be pinned for a CUDA model.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from lmswap.errors import DriverError

_log = logging.getLogger(__name__)

_READ_BYTES = 2**14  # per read: mostly all of /proc/self/status
_ARENA_BYTES = 64 * 2**20  # glibc's HEAP_MAX_SIZE
_ARENA_BLOCK_BYTES = 120 * 2**10  # below glibc's least M_MMAP_THRESHOLD, from which on blocks are mapped by themselves
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42  # of linux/prctl.h
_changing_pages = Lock()


@dataclass(frozen=True)
class HostMemory:
    """Main memory that this process may use: the machine's, or less where its cgroup has a limit."""

    total_bytes: int
    available_bytes: int


def resident_bytes() -> int:
    """Resident memory of this process (VmRSS)."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The highest `resident_bytes` since the process began or `reset_peak_resident` was called (VmHWM)."""
    return _status("VmHWM")


def reset_peak_resident() -> None:
    """Restarts `peak_resident_bytes` from the current resident memory.

    Raises:
        DriverError: the kernel or its sandbox does not support it.
    """
    try:
        file = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(file, b"5")
        finally:
            os.close(file)
    except OSError as error:
        raise DriverError(
            f"the peak of resident memory cannot be measured here: writing /proc/self/clear_refs failed ({error}); "
            "lmswap needs it to check a budget on the CPU"
        ) from error


def release_free_memory() -> None:
    """Make glibc return free pages to the system; other C libraries keep none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_thread_memory() -> None:
    """Return what the calling thread has freed to the system.

    A thread allocates from an arena of glibc's own, of at most 64 MiB of addresses. `malloc_trim` does not return the
    free memory at its end, and free() only what exceeds M_TRIM_THRESHOLD, which grows to 64 MiB (glibc 2.36). So all of
    it is allocated in blocks, and freed before the last of them, which is then the end. Of each block glibc writes the
    first bytes, for which the kernel must not map a huge page.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    malloc, free = libc.malloc, libc.free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    with _small_pages(libc):
        *freed, last = [malloc(_ARENA_BLOCK_BYTES) for _ in range(_ARENA_BYTES // _ARENA_BLOCK_BYTES)]
        for block in freed:
            free(block)
        release_free_memory()
    free(last)


@contextmanager
def _small_pages(libc: ctypes.CDLL) -> Iterator[None]:
    """Keep the kernel from mapping transparent huge pages for this process, by one thread at a time."""
    with _changing_pages:
        is_changed = libc.prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0 == libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
        try:
            yield
        finally:
            if is_changed:
                libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Main memory: the minimum of /proc/meminfo and the limits of this process's cgroups (version 1 and 2).

    ``root`` is the directory with /proc and /sys.
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    total_bytes, available_bytes = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit_bytes, used_bytes in _cgroup_limits(root):
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return HostMemory(total_bytes, available_bytes)


class _Status:
    """/proc/self/status, kept open: opening and closing it takes twice as long as reading it (Linux 6.18)."""

    def __init__(self) -> None:
        self._file = -1
        os.register_at_fork(after_in_child=self.forget)  # it remains that of the parent

    def find(self, line: re.Pattern[bytes]) -> int | None:
        """Return the bytes in ``line``, whose group is their number in KiB; None if there is no such line.

        Raises:
            OSError: other code has closed the file.
        """
        if self._file < 0:
            self._file = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        text = os.pread(self._file, _READ_BYTES, 0)
        while (found := line.search(text)) is None and (more := os.pread(self._file, _READ_BYTES, len(text))):
            text += more
        return int(found[1]) * 1024 if found is not None else None

    def forget(self) -> None:
        """Open the file again for the next read; the descriptor may be another file's by now, and is not closed."""
        self._file = -1


_STATUS = _Status()


_LINES = {name: re.compile(rf"^{name}:\s*(\d+) kB".encode(), re.MULTILINE) for name in ("VmHWM", "VmRSS")}


def _status(name: str) -> int:
    line = _LINES[name]
    for _ in range(2):
        with suppress(OSError):
            if (nbytes := _STATUS.find(line)) is not None:
                return nbytes
        _STATUS.forget()
    raise DriverError(f"the kernel does not report this process's memory: /proc/self/status has no {name}")


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each memory cgroup that this process is in, from the innermost out.

    Inactive page cache counts as used in the kernel's figure, not in this one.
    """
    try:
        memberships = os.fsdecode((root / "proc/self/cgroup").read_bytes())  # names of any bytes but line ends
    except OSError:
        return
    for membership in filter(None, memberships.split("\n")):
        _, controllers, group = membership.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, and only its outer part (the mount itself) exists.
        folder = Path(group.strip("/"))
        for inner in (folder, *folder.parents):
            limits = _read_limit(mount / inner, *names)
            if limits is not None:
                yield limits


def _read_limit(folder: Path, limit_name: str, used_name: str, cache_key: str) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used_bytes = int((folder / used_name).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except FileNotFoundError:
        return None
    except OSError as error:  # some containers list files that cannot be read
        _log.warning("the memory limit of '%s' cannot be read and is ignored: %s", folder, error.strerror)
        return None
    return int(limit), used_bytes - int(stat.get(cache_key, 0))
