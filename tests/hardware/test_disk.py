import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmswap.errors import TierError
from lmswap.hardware import disk

MIB = 2**20


def mounts(tmp_path, *lines):
    path = tmp_path / "mountinfo"
    path.write_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))
    return path


def test_the_innermost_mount_names_the_file_system(tmp_path):
    inner = tmp_path / "with space"
    inner.mkdir()
    written = str(inner).replace(" ", "\\040")
    mountinfo = mounts(
        tmp_path,
        "1 0 9:1 / / rw - ext4 /dev/vda rw",
        f"2 1 9:2 / {written} rw shared:1 - xfs /dev/nvme0n1 rw",
        "3 1 9:3 / /elsewhere rw - tmpfs tmpfs rw",
    )
    found = disk.describe_directory(str(inner), mountinfo)
    assert (found.filesystem, found.source, found.is_memory) == ("xfs", "/dev/nvme0n1", False)
    assert disk.describe_directory(str(tmp_path), mountinfo).filesystem == "ext4"


@pytest.mark.parametrize(
    "name", [b"caf\xe9", "café".encode(), b"two lines \xc2\x85 \xe2\x80\xa8 ", b"a\\b", b"tab\there"], ids=repr
)
def test_a_mount_with_any_bytes_in_its_name_is_found(tmp_path, name):
    inner = tmp_path / os.fsdecode(name)
    inner.mkdir()
    written = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in str(inner))
    mountinfo = mounts(
        tmp_path,
        "1 0 9:1 / / rw - ext4 /dev/vda rw",
        f"2 1 9:2 / {written} rw shared:1 - vfat /dev/disk/{written.rpartition('/')[2]} rw",
    )
    found = disk.describe_directory(str(inner), mountinfo)
    assert (found.filesystem, found.source) == ("vfat", f"/dev/disk/{os.fsdecode(name)}")
    assert disk.describe_directory(str(tmp_path), mountinfo).filesystem == "ext4"


def test_of_mounts_on_one_point_the_top_one_counts(tmp_path):
    mountinfo = mounts(tmp_path, "1 0 9:1 / / rw - ext4 /dev/vda rw", "2 1 9:2 / / rw - overlay overlay rw")
    assert disk.describe_directory(str(tmp_path), mountinfo).filesystem == "overlay"


def test_free_room_is_that_of_the_file_system(tmp_path):
    found, stat = disk.describe_directory(str(tmp_path)), os.statvfs(tmp_path)
    assert found.total_bytes == stat.f_blocks * stat.f_frsize
    assert 0 < found.free_bytes <= found.total_bytes


@pytest.fixture
def kinds(monkeypatch):
    """Lets a test say what lies under which directory; the default is a disk with 100 MiB free."""
    known = {}

    def describe(path):
        filesystem, free_bytes = known.get(path, ("ext4", 100 * MIB))
        return disk.Directory(path, filesystem, "device", 200 * MIB, free_bytes)

    monkeypatch.setattr(disk, "describe_directory", describe)
    monkeypatch.setattr(disk, "_keeps_page_cache", lambda path: False)
    return known


def test_the_temporary_directory_is_the_default(kinds, monkeypatch, tmp_path):
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    assert disk.swap_directory() == str(tmp_path)


def test_var_tmp_replaces_a_temporary_directory_in_memory(kinds, monkeypatch, tmp_path):
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    kinds[str(tmp_path)] = ("tmpfs", 100 * MIB)
    assert disk.swap_directory() == "/var/tmp"


def test_when_none_will_do_the_error_names_each_with_its_reason(kinds, monkeypatch, tmp_path):
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    kinds[str(tmp_path)], kinds["/var/tmp"] = ("ramfs", 0), ("tmpfs", 0)
    with pytest.raises(TierError) as caught:
        disk.swap_directory()
    assert f"'{tmp_path}' is memory, not a disk (ramfs)" in str(caught.value)
    assert "'/var/tmp' is memory, not a disk (tmpfs)" in str(caught.value)
    assert "disk_directory=" in str(caught.value)


def test_a_requested_directory_is_never_replaced(kinds, tmp_path):
    kinds[str(tmp_path)] = ("tmpfs", 100 * MIB)
    with pytest.raises(TierError, match="is memory, not a disk"):
        disk.swap_directory(str(tmp_path))


def test_the_variable_names_the_default_directory(kinds, monkeypatch, tmp_path):
    (tmp_path / "asked").mkdir()
    monkeypatch.setenv("LMSWAP_DISK_DIRECTORY", str(tmp_path))
    assert disk.swap_directory() == str(tmp_path)
    assert disk.swap_directory(str(tmp_path / "asked")) == str(tmp_path / "asked")
    monkeypatch.setenv("LMSWAP_DISK_DIRECTORY", str(tmp_path / "missing"))
    with pytest.raises(TierError, match="missing' is not a directory"):
        disk.swap_directory()


def test_a_missing_and_an_unwritable_directory_are_refused(monkeypatch, tmp_path):
    with pytest.raises(TierError, match="missing' is not a directory"):
        disk.swap_directory(str(tmp_path / "missing"))
    with pytest.raises(TierError, match="is not a directory"):
        disk.describe_directory(__file__)
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(TierError, match="is not writable"):
        disk.swap_directory(str(tmp_path))


def test_a_world_writable_directory_without_sticky_bit_is_refused(kinds, tmp_path):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(TierError, match=r"open' is open to all users, .*\(chmod 700 or 1777 it\)"):
        disk.swap_directory(str(directory))
    directory.chmod(0o1777)
    assert disk.swap_directory(str(directory)) == str(directory)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_shared_memory_is_known_as_memory():
    assert disk.describe_directory("/dev/shm").is_memory


@pytest.mark.parametrize("source", ["/dev/ram0", "/dev/zram12"])
def test_a_ram_disk_is_known_as_memory(tmp_path, source):
    mountinfo = mounts(tmp_path, f"1 0 9:1 / / rw - ext4 {source} rw")
    assert disk.describe_directory(str(tmp_path), mountinfo).is_memory


MOUNT = """
import os, sys
from lmswap.errors import TierError
from lmswap.hardware.disk import describe_directory, swap_directory
assert describe_directory(sys.argv[1]).filesystem == "overlay"
try:
    print(swap_directory(sys.argv[1]))
except TierError as error:
    print(error)
"""


def in_overlay(tmp_path, upper):
    """What is said of an overlay whose upper layer is in the directory ``upper``, in a namespace of its own."""
    lower, mount = tmp_path / "lower", tmp_path / "mount"
    for path in (lower, mount):
        path.mkdir(exist_ok=True)
    layers = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work"
    command = f"mkdir {upper}/upper {upper}/work && mount -t overlay none -o {layers} {mount} || exit 77"
    command = f"mount -t tmpfs none {tmp_path}/tmpfs && {command}; {sys.executable} -c '{MOUNT}' {mount}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"no overlay can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), str(mount)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("upper", ["tmpfs", "disk"])
def test_an_overlay_is_memory_where_its_upper_layer_is(tmp_path, upper):
    for name in ("tmpfs", "disk"):
        (tmp_path / name).mkdir()
    if upper == "disk" and disk.describe_directory(str(tmp_path)).is_memory:
        pytest.skip("no disk here")
    said, mount = in_overlay(tmp_path, tmp_path / upper)
    assert (f"'{mount}' is memory, not a disk (overlay)" in said) == (upper == "tmpfs")
    assert (said == mount) == (upper == "disk")


def test_a_kernel_that_calls_every_page_resident_makes_no_disk_memory(monkeypatch, tmp_path):
    def mincore(start, length, resident):
        resident[:] = [1, 1]
        return 0

    monkeypatch.setattr(disk, "_libc", SimpleNamespace(mincore=mincore))
    assert disk.swap_directory(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("error", "said"), [(errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error")]
)
def test_a_directory_in_which_nothing_can_be_written_is_refused(monkeypatch, tmp_path, error, said):
    def fail(**_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", fail)
    with pytest.raises(TierError, match=f"'{tmp_path}' cannot be used: {said}"):
        disk.swap_directory(str(tmp_path))


@pytest.mark.parametrize("path", ["a\0b", "/tmp/caf\udce9"])
def test_a_path_that_the_engine_cannot_be_given_is_refused(path):
    with pytest.raises(TierError, match="is not a path of UTF-8"):
        disk.swap_directory(path)


def test_a_path_that_is_too_long_is_refused():
    with pytest.raises(TierError, match="cannot be used: File name too long"):
        disk.swap_directory("a" * 5000)


def test_a_machine_without_any_temporary_directory_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(disk.tempfile, "tempdir", None)
    monkeypatch.setattr(disk.tempfile, "_get_default_tempdir", tempfile_of_a_read_only_machine)
    with pytest.raises(TierError, match="no directory for swap files: No usable temporary directory found in"):
        disk.swap_directory()


def tempfile_of_a_read_only_machine():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")
