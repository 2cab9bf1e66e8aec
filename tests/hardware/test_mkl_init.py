"""MKL has chosen its kernels when lmswap has been imported, by one thread: later first calls of several cannot race."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

# `mkl_vml_serv_cpu_detect` begins with mov eax, [rip + n]; cmp eax, -1: the type of CPU that was detected, -1 before.
SCRIPT = """
import ctypes, importlib, struct, sys, torch

def detected():
    try:
        detect = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so").mkl_vml_serv_cpu_detect
    except (OSError, AttributeError):
        sys.exit("torch's library shows no mkl_vml_serv_cpu_detect")
    at = ctypes.cast(detect, ctypes.c_void_p).value
    code = ctypes.string_at(at, 9)
    if (code[:2], code[6:]) != (bytes.fromhex("8b05"), bytes.fromhex("83f8ff")):
        sys.exit(f"mkl_vml_serv_cpu_detect begins in another way: {code.hex()}")
    return ctypes.c_int.from_address(at + 6 + struct.unpack("<i", code[2:6])[0]).value

before = detected()
importlib.import_module("IMPORTED")
print(before, detected())
"""
THREADS = """
import os, torch
from lmswap.hardware.mkl_init import initialize_mkl
before = len(os.listdir("/proc/self/task"))
initialize_mkl()
print(before, len(os.listdir("/proc/self/task")))
"""


def run_fresh(script: str) -> tuple[int, int]:
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    if run.returncode == 1 and "mkl_vml" in run.stderr and "Traceback" not in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    first, second = map(int, run.stdout.split())
    return first, second


@pytest.mark.parametrize("imported", ["lmswap", pytest.param("lmswap.api", marks=pytest.mark.slow)])
def test_the_import_chooses_the_kernels(imported):
    before, after = run_fresh(SCRIPT.replace("IMPORTED", imported))
    assert before == -1
    assert after != -1


def test_no_thread_is_started_for_it_that_forks_would_lack():
    before, after = run_fresh(THREADS)
    assert before == after


class Made(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "train"),
    [
        ("benchmarks.peers.cell", lambda cell: cell.run_cell(None)),
        ("benchmarks.conformance.check", lambda check: next(check.check_all(iter(()), "hooks", (), None))),
        ("benchmarks.unet3d.run", lambda run: run.main()),
    ],
)
def test_benchmarks_make_the_first_calls_before_they_train_without_lmswap(monkeypatch, module, train):
    monkeypatch.setattr(f"{module}.initialize_mkl", Mock(side_effect=Made))
    with pytest.raises(Made):
        train(importlib.import_module(module))
