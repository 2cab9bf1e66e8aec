import os

import pytest

from lmswap.hardware import cache
from lmswap.hardware.cache import CacheFile, cache_directory


@pytest.fixture
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_written_values_are_read_back_under_their_own_key_only(directory):
    CacheFile.locate("plan", {"n": 1}).write({"seconds": 1.5})
    assert CacheFile.locate("plan", {"n": 1}).read() == {"seconds": 1.5}
    assert CacheFile.locate("plan", {"n": 2}).read() is None
    assert CacheFile.locate("machine", {"n": 1}).read() is None


def test_files_are_the_users_alone_and_no_drafts_are_left(directory):
    file = CacheFile.locate("plan", {})
    file.write({})
    file.write({"new": True})
    assert file.read() == {"new": True}
    assert [path.name for path in directory.iterdir()] == [file.path.name]
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": {"n": 2}}', "\udcff"])
def test_damage_is_a_value_error(directory, text):
    file = CacheFile.locate("plan", {"n": 1})
    file.write({})
    file.path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError):
        file.read()


def test_files_of_a_kind_are_bounded_and_the_oldest_go(directory, monkeypatch):
    other, *files = (CacheFile.locate(kind, {"n": n}) for n, kind in enumerate(["machine", *["plan"] * 8]))
    other.write({})
    for age, file in enumerate(files):
        file.write({"steps": "x" * 1000})
        os.utime(file.path, (age, age))
    monkeypatch.setattr(cache, "_MAX_BYTES", 4 * files[0].path.stat().st_size)
    files[2].write({"steps": "y" * 1000})
    assert [file.read() is not None for file in files] == [False, False, True, False, False, True, True, True]
    assert other.read() is not None


def test_an_empty_directory_name_disables_the_cache(monkeypatch):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", "")
    file = CacheFile.locate("plan", {})
    file.write({"n": 1})
    assert file.read() is None


def test_the_directory_is_lmswaps_own_then_the_desktops_then_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("LMSWAP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "lmswap"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "lmswap"


def test_without_a_home_one_warning_names_the_cache_variable(monkeypatch, caplog):
    for name in ("LMSWAP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no such user"])
    for _ in range(2):
        file = CacheFile.locate("plan", {})
        file.write({"n": 1})
        assert file.read() is None
    assert caplog.text.count("has no home") == 1 and "set LMSWAP_CACHE_DIR" in caplog.text


def test_symbolic_links_are_neither_read_nor_written_through(directory, tmp_path):
    file, target = CacheFile.locate("plan", {}), tmp_path / "precious"
    file.write({"n": 1})
    file.path.rename(target)
    file.path.symlink_to(target)
    before = target.read_text()
    with pytest.raises(OSError, match="symbolic links"):
        file.read()
    file.write({"n": 2})
    assert target.read_text() == before
    assert not file.path.is_symlink()
    assert file.read() == {"n": 2}


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_trusted(directory, mode):
    file = CacheFile.locate("plan", {})
    file.write({})
    file.path.chmod(mode)
    with pytest.raises(ValueError, match="only this user may write"):
        file.read()


def test_a_pipe_is_refused_and_does_not_block(directory):
    file = CacheFile.locate("plan", {})
    directory.mkdir()
    os.mkfifo(file.path, 0o600)
    with pytest.raises(ValueError, match="not a file"):
        file.read()


@pytest.mark.parametrize("mask", [0, 0o002, 0o022])
def test_the_directory_and_missing_parents_are_private(tmp_path, monkeypatch, mask):
    directory = tmp_path / "new home" / ".cache" / "lmswap"
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(directory))
    before = os.umask(mask)
    try:
        CacheFile.locate("plan", {}).write({})
    finally:
        os.umask(before)
    made = [directory, *directory.parents[: directory.parents.index(tmp_path)]]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_in_is_neither_read_nor_written(directory, mode, caplog):
    file = CacheFile.locate("machine", {})
    file.write({"n": 1})
    directory.chmod(mode)
    with pytest.raises(ValueError, match=f"others may write in '{directory}': its mode is {mode:o}; chmod 700 it"):
        file.read()
    file.write({"n": 2})
    assert "others may write in" in caplog.text
    directory.chmod(0o755)
    assert file.read() == {"n": 1}


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to others")


@root_only
@pytest.mark.parametrize("what", ["file", "directory", "link to the directory"])
def test_files_of_other_users_are_not_trusted(directory, what, tmp_path, monkeypatch, caplog):
    file = CacheFile.locate("plan", {})
    file.write({"n": 1})
    if what == "file":
        os.chown(file.path, 12345, 12345)
    elif what == "directory":
        os.chown(directory, 12345, 12345)
    else:
        link = tmp_path / "link"
        link.symlink_to(directory)
        os.lchown(link, 12345, 12345)
        monkeypatch.setenv("LMSWAP_CACHE_DIR", str(link))
        file = CacheFile.locate("plan", {})
    with pytest.raises(ValueError, match="user"):
        file.read()
    file.write({"n": 2})
    assert ("belongs to another user" in caplog.text) == (what != "file")
    if what != "file":
        assert '"n":1' in file.path.read_text()


def test_an_unfinished_draft_is_removed(directory, monkeypatch):
    file = CacheFile.locate("plan", {})
    file.write({"n": 1})
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    file.write({"n": 2})
    assert file.read() == {"n": 1}
    assert [path.name for path in directory.iterdir()] == [file.path.name]
