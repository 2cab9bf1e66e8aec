"""The first hour on a GPU goes on where it was stopped, ends what takes too long, and says on which device it was."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.first_hour import __main__ as first_hour
from benchmarks.first_hour.page import page
from benchmarks.first_hour.parts import Part, parts
from lmswap.hardware.device import DeviceInfo

ORIGIN = {"device": "Emulated GPU", "driver": "CUDA driver 580", "torch": "2.13.0", "commit": "abcdef"}


def step(reserved_bytes, *, retries):
    return {"reserved_bytes": reserved_bytes, "retries": retries}


FOUND = {
    "facts": {
        "used_by_contexts_bytes": 2**29,
        "total_bytes": 2**33,
        "workspaces_bytes": 2**26,
        "microseconds": {"make an event": 0.8},
        "pinned_bytes_per_second": 3e9,
        "reserved_bytes_per_second": 9e9,
    },
    "tests": {"tests": [{"test": "tests/gpu/a.py::test_b", "outcome": "failed"}, {"outcome": "passed"}]},
    "cards": {
        "card": 1.02,
        "runs": [
            {"network": "gpt", "share": None, "steps": [step(2**31, retries=0)]},
            {
                "network": "gpt",
                "share": 0.5,
                "budget_bytes": 2**30,
                "steps": [step(2**29, retries=1), *3 * [step(2**28, retries=2)]],
                "same": {"losses": True, "weights": True},
            },
            {"network": "gpt", "share": 0.3, "budget_bytes": 2**29, "failure": "no plan fits"},
        ],
    },
    "repeats": {
        "default": {"ops": 9, "not_repeated": {"aten.index_add.default": 2}},
        "benchmark": {"ops": 9, "not_repeated": {}},
    },
    "compared": {
        "runs": [
            {
                "configuration": {"size": 192, "policy": "auto"},
                "peak_bytes": 2**31,
                "tensor_peak_bytes": 2**30,
                "step_seconds": [1.0, 0.5],
            }
        ],
        "failures": [],
    },
}


def test_the_page_says_in_every_heading_on_which_device_it_was():
    ended = {name: {"title": name, "outcome": "done", "seconds": 1.0} for name in FOUND}
    text = page(ORIGIN, ended, FOUND)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) == 1 + len(FOUND)
    assert all("on Emulated GPU" in heading for heading in headings)
    for part in (
        "512.00 MiB of 8.00 GiB are contexts'",
        "1 passed, 0 skipped, 1 failed",
        "failed: tests/gpu/a.py::test_b",
        "gpt within 50%, 1024 MiB: reserved 0.500 of it, 0 retries after step 3, the bits of plain torch",
        "gpt within 30%, 512 MiB: no plan fits",
        "2 of 9 ops: 2 aten.index_add.default",
        "| 192³, lmswap | 2.00 GiB | 1.00 GiB | 0.500 |",
    ):
        assert part in text


def test_every_part_writes_into_a_folder_of_its_own(tmp_path):
    folders = [part.result.parent for part in parts(tmp_path, 144, 192)]
    assert len(set(folders)) == len(folders)
    assert all(folder.parent == tmp_path for folder in folders)


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """Runs parts that are Python programs, as if on a GPU; gives what the file of results holds then."""
    device = DeviceInfo("cuda:0", "Some GPU", 2**33, 2**33, "2.13.0", "CUDA driver 580")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_hour, "describe_device", lambda _: device)

    def run(*arguments, **programs):
        made = [Part(name, name, ("-c", program), tmp_path / name / "found.json") for name, program in programs.items()]
        monkeypatch.setattr(first_hour, "parts", lambda folder, small, large: made)
        code = first_hour.main(["--results", str(tmp_path), *arguments])
        return code, json.loads((tmp_path / "first_hour_some_gpu.json").read_text())

    return run


def finds(number, folder):
    return f"open({str(folder / 'found.json')!r}, 'w').write('{number}')"


def test_what_was_done_is_not_run_again_and_what_failed_is(hour, tmp_path):
    good, bad = finds(1, tmp_path / "good"), "raise SystemExit(3)"
    code, results = hour(good=good, bad=bad)
    assert code == 1
    assert results["found"] == {"good": 1, "bad": None}
    assert results["parts"]["bad"]["outcome"] == "exit status 3, see found.log"
    code, results = hour(good="raise SystemExit(4)", bad=finds(2, tmp_path / "bad"))
    assert code == 0
    assert results["found"] == {"good": 1, "bad": 2}
    assert "| bad | done |" in (tmp_path / "first_hour_some_gpu.md").read_text()


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(hour, tmp_path):
    written = tmp_path / "child"
    child = f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    slow = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {child!r}])"
    code, results = hour("--limit", "5", slow=slow)
    assert code == 1
    assert results["parts"]["slow"]["outcome"] == "ended after 5 s"
    number = int(written.read_text())
    until = time.monotonic() + 60
    while is_alive(number) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(number)


def is_alive(number):
    stat = Path(f"/proc/{number}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and os.getpid() != number


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_hour.main([]) == 2
    assert "DEVICE=emulated" in capsys.readouterr().out
