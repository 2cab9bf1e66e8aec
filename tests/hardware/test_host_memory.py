import mmap
import os
import subprocess
import sys

import pytest

from lmswap.errors import DriverError
from lmswap.hardware import host_memory

GIB, MIB, PAGE = 2**30, 2**20, 4096


def machine(root, *, cgroup, files):
    """A file tree like /proc and /sys of a machine with 64 GiB, 48 of them available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_bytes(os.fsencode(cgroup))
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return host_memory.read_host_memory(root)


def version2(folder, limit, used, cache=0):
    place = f"sys/fs/cgroup/{folder}"
    stat = f"anon 1\ninactive_file {cache}\n"
    return {f"{place}/memory.max": f"{limit}\n", f"{place}/memory.current": f"{used}\n", f"{place}/memory.stat": stat}


def test_without_a_cgroup_limit_the_machine_counts(tmp_path):
    found = machine(tmp_path, cgroup="0::/user/shell\n", files=version2("user/shell", "max", 5 * GIB))
    assert found == host_memory.HostMemory(64 * GIB, 48 * GIB)


def test_the_tightest_of_nested_cgroups_counts(tmp_path):
    files = {**version2("job/task", 32 * GIB, 2 * GIB), **version2("job", 16 * GIB, 6 * GIB), **version2(".", "max", 0)}
    assert machine(tmp_path, cgroup="0::/job/task\n", files=files) == host_memory.HostMemory(16 * GIB, 10 * GIB)


def test_reclaimable_page_cache_is_available(tmp_path):
    found = machine(tmp_path, cgroup="0::/job\n", files=version2("job", 16 * GIB, 15 * GIB, cache=9 * GIB))
    assert found == host_memory.HostMemory(16 * GIB, 10 * GIB)


def test_a_cgroup_over_its_limit_has_nothing_available(tmp_path):
    assert machine(tmp_path, cgroup="0::/job\n", files=version2("job", GIB, 2 * GIB)) == host_memory.HostMemory(GIB, 0)


def test_version_1_in_a_container_that_sees_only_the_outer_folder(tmp_path):
    place = "sys/fs/cgroup/memory"
    files = {
        f"{place}/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{place}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{place}/memory.stat": f"cache 0\ntotal_inactive_file {GIB}\n",
    }
    found = machine(tmp_path, cgroup="5:cpu,cpuacct:/x\n4:memory:/docker/0123\n", files=files)
    assert found == host_memory.HostMemory(8 * GIB, 6 * GIB)


def test_a_system_without_cgroups_has_no_limits(tmp_path):
    machine(tmp_path, cgroup="", files={})
    (tmp_path / "proc/self/cgroup").unlink()
    assert host_memory.read_host_memory(tmp_path) == host_memory.HostMemory(64 * GIB, 48 * GIB)


def test_an_unreadable_limit_is_logged_and_ignored(tmp_path, caplog):
    (tmp_path / "sys/fs/cgroup/job/memory.max").mkdir(parents=True)
    assert machine(tmp_path, cgroup="0::/job\n", files={}) == host_memory.HostMemory(64 * GIB, 48 * GIB)
    assert "cannot be read and is ignored: Is a directory" in caplog.text


def test_this_machine_can_be_read():
    found = host_memory.read_host_memory()
    assert 0 < found.available_bytes <= found.total_bytes


def test_resident_memory_rises_by_touched_pages_and_its_peak_stays():
    before, size = host_memory.resident_bytes(), 256 * MIB
    block = mmap.mmap(-1, size)
    for offset in range(0, size, PAGE):
        block[offset] = 1
    risen = host_memory.resident_bytes() - before
    block.close()
    slack = size // 4  # the kernel counts in batches, on each core
    assert risen > size - slack
    assert host_memory.resident_bytes() < before + slack
    assert host_memory.peak_resident_bytes() > before + size - slack
    host_memory.reset_peak_resident()
    assert host_memory.peak_resident_bytes() < before + slack


def test_a_status_of_many_pieces_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(host_memory, "_READ_BYTES", 100)
    assert host_memory.resident_bytes() > MIB
    monkeypatch.setitem(host_memory._LINES, "VmRSS", host_memory.re.compile(b"VmNone"))
    with pytest.raises(DriverError, match="has no VmRSS"):
        host_memory.resident_bytes()


def test_memory_is_read_though_other_code_closed_the_status_file_or_opened_another_in_its_place(tmp_path):
    host_memory.resident_bytes()
    os.close(host_memory._STATUS._file)
    assert host_memory.resident_bytes() > MIB
    descriptor = host_memory._STATUS._file
    with (tmp_path / "other").open("wb+") as other:
        os.dup2(other.fileno(), descriptor)
        assert host_memory.resident_bytes() > MIB
        os.close(descriptor)  # which has been left open, as it is not ours any more


def test_a_forked_child_reads_its_own_memory():
    host_memory.resident_bytes()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        before = host_memory.resident_bytes()
        block = mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, len(block), PAGE):
            block[offset] = 1
        os.write(write, str(host_memory.resident_bytes() - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) > 250 * MIB
    os.close(read)
    os.close(write)


def test_a_kernel_that_cannot_reset_the_peak_is_an_error(monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(host_memory.os, "open", refuse)
    with pytest.raises(DriverError, match=r"/proc/self/clear_refs failed .*Permission denied"):
        host_memory.reset_peak_resident()


@pytest.mark.parametrize("name", [b"caf\xe9.slice", b"two\xc2\x85lines", b"a:b"], ids=repr)
def test_the_limit_of_a_cgroup_with_any_bytes_in_its_name_counts(tmp_path, name):
    group = os.fsdecode(name)
    found = machine(tmp_path, cgroup=f"0::/{group}\n", files=version2(group, 4 * GIB, GIB))
    assert found.total_bytes == 4 * GIB


# In a process of its own: mallopt is for good.
_THREAD = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from lmswap.hardware.host_memory import release_free_memory, release_thread_memory, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallopt(-1, 64 * 2**20)  # M_TRIM_THRESHOLD, as large blocks that are freed raise it
blocks = (ctypes.c_void_p * 900)()

def work(finish):
    for index in range(900):
        blocks[index] = libc.malloc(50_000)
        ctypes.memset(blocks[index], 1, 50_000)
    for block in blocks:
        libc.free(block)
    before = resident_bytes()
    finish()
    return before - resident_bytes()

with ThreadPoolExecutor(1) as thread:
    print(*(thread.submit(work, finish).result() for finish in (release_free_memory, release_thread_memory)))
"""


def test_a_thread_returns_the_free_memory_at_the_end_of_its_arena():
    done = subprocess.run([sys.executable, "-c", _THREAD], capture_output=True, text=True, check=True)
    by_malloc_trim, by_release = map(int, done.stdout.split())
    assert by_malloc_trim < 10 * MIB  # else glibc needs no help
    assert by_release > 35 * MIB


_PEAK = """
from concurrent.futures import ThreadPoolExecutor
from lmswap.hardware.host_memory import (
    peak_resident_bytes, release_thread_memory, reset_peak_resident, resident_bytes
)

def released():
    release_thread_memory()  # what is imported and allocated once
    reset_peak_resident()
    before = resident_bytes()
    release_thread_memory()
    return peak_resident_bytes() - before

with ThreadPoolExecutor(1) as thread:
    print(released(), thread.submit(released).result())
"""


def test_a_thread_takes_little_memory_to_return_its_own_where_pages_are_huge():
    """As on systems that give every process transparent huge pages; here, glibc (2.35 and later) advises them."""
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run([sys.executable, "-c", _PEAK], env=environment, capture_output=True, text=True, check=True)
    assert max(map(int, done.stdout.split())) < 8 * MIB
