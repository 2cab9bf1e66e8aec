"""Files that a user names: what is no file of text is refused in a sentence, at once and without filling memory."""

import gzip
import os
import socket

import pytest

from benchmarks.distributed import __main__ as distributed
from lmswap.cli import entry
from lmswap.errors import LmswapError
from lmswap.files import read_text
from lmswap.profiling.readers import read_traces
from lmswap.session.plan_file import PinnedPlans
from tests.reporting.small_step import MACHINE, PROGRAM

pytestmark = pytest.mark.timeout(60)


def bind(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # an absolute one may be longer than a socket's address


def sparse(path, nbytes):
    with path.open("wb") as file:
        file.truncate(nbytes)


KINDS = {
    "FIFO": (os.mkfifo, "it is a FIFO, not a file"),
    "socket": (bind, "it is a socket, not a file"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
    "terminal": (lambda path: path.symlink_to("/dev/ptmx"), "it is a device, not a file"),
    "directory": (lambda path: path.mkdir(), "it is a directory, not a file"),
    "huge": (lambda path: sparse(path, 2**40), "it has 1024.00 GiB, and no more than 1.00 GiB of text are read"),
    "endless": (lambda path: path.symlink_to("/proc/self/pagemap"), "no more than 1.00 GiB of text are read"),
    "bomb": (lambda path: path.write_bytes(gzip.compress(bytes(2**28))), "unpacks to more than 100 times its"),
    "cut short": (lambda path: path.write_bytes(gzip.compress(b"{}")[:-9]), "it is a damaged gzip file"),
    "garbled": (lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(range(99))), "it is a damaged gzip file"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe{}"), "can't decode byte 0xff"),
}
PATHS = {"a\0b": "a path cannot hold NUL", "a" * 5000: "File name too long", "a/" * 2500 + "a": "File name too long"}


@pytest.fixture
def commands(tmp_path, capsys):
    """What reads a file that a user names, and gives what was said of it."""
    (tmp_path / "program.json").write_text(PROGRAM.to_json())
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    program, machine = str(tmp_path / "program.json"), str(tmp_path / "machine.json")

    def command(*arguments):
        def run(path):
            main = distributed.main if arguments[0] == "predict" else entry.main
            assert main([argument or path for argument in arguments]) == 2
            return capsys.readouterr().err

        return run

    def refused(read):
        def run(path):
            with pytest.raises(LmswapError) as raised:
                read(path)
            return str(raised.value)

        return run

    return {
        "program": command("plan", "", "--machine", machine, "--budget", "90%"),
        "machine": command("plan", program, "--machine", "", "--budget", "90%"),
        "network": command(
            "predict", program, "--machine", machine, "--budget", "90%", "--ranks", "2", "--network", ""
        ),
        "plan": refused(PinnedPlans.read),
        "diff": command("diff", "", ""),
        "trace": refused(read_traces),
        "profile": command("profile", "--read", ""),
    }


READERS = ("program", "machine", "network", "plan", "diff", "trace", "profile")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_binary_files(commands, reader, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, said = KINDS[kind]
    make(tmp_path / "given.json")
    reported = commands[reader](str(tmp_path / "given.json"))
    assert said in reported and str(tmp_path / "given.json") in reported


@pytest.mark.parametrize("path", PATHS, ids=["NUL", "a long name", "a long path"])
@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_no_file_can_have_is_refused_by_every_reader(commands, reader, path):
    said = "no network is called" if reader == "network" else PATHS[path]  # names of known networks are looked up first
    assert said in commands[reader](path)


def test_a_gzip_file_is_known_by_its_content(tmp_path):
    for name in ("text.json", "text.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress("{1: 'é'}".encode()))
        assert read_text(tmp_path / name) == "{1: 'é'}"
        (tmp_path / name).write_text("{}")
        assert read_text(str(tmp_path / name)) == "{}"
