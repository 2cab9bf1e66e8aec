import os
from pathlib import Path

import pytest

from lmswap.errors import TierError
from lmswap.hardware import disk

MIB = 2**20


def mounts(tmp_path, *lines):
    path = tmp_path / "mountinfo"
    path.write_text("\n".join(lines) + "\n")
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
    return known


def test_the_temporary_directory_is_the_default(kinds, monkeypatch, tmp_path):
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    assert disk.swap_directory() == str(tmp_path)


def test_var_tmp_stands_in_for_a_temporary_directory_in_memory(kinds, monkeypatch, tmp_path):
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    kinds[str(tmp_path)] = ("tmpfs", 100 * MIB)
    assert disk.swap_directory() == "/var/tmp"


def test_when_none_will_do_the_error_names_each_with_its_reason(kinds, monkeypatch, tmp_path):
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    kinds[str(tmp_path)], kinds["/var/tmp"] = ("ramfs", 0), ("ext4", 3 * MIB)
    with pytest.raises(TierError) as caught:
        disk.swap_directory(needed_bytes=50 * MIB)
    assert f"'{tmp_path}' is memory, not a disk (ramfs)" in str(caught.value)
    assert "'/var/tmp' has 3.00 MiB free, 50.00 MiB are needed" in str(caught.value)
    assert "disk_directory=" in str(caught.value)


def test_a_directory_that_was_asked_for_is_never_replaced(kinds, tmp_path):
    kinds[str(tmp_path)] = ("tmpfs", 100 * MIB)
    with pytest.raises(TierError, match="is memory, not a disk"):
        disk.swap_directory(str(tmp_path))


def test_the_variable_names_the_directory_where_nobody_asks_for_another(kinds, monkeypatch, tmp_path):
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


def test_a_directory_open_to_all_is_refused_unless_others_cannot_change_what_is_not_theirs(kinds, tmp_path):
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
