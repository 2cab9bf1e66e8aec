import pytest

from lmswap.hardware.cache import CacheFile, cache_directory


@pytest.fixture
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_written_is_read_back_under_its_own_key_only(directory):
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


def test_an_empty_directory_name_switches_it_off(monkeypatch):
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
