"""Programs in processes of their own, on an emulated machine by environment variables."""

import os
import subprocess
import sys

PROLOGUE = """
import time, torch
from tools.emulated_gpu import machine
machine.start()
"""


def end(program: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run ``program``, before which the machine starts with ``settings``; return it with its exit code and output."""
    environment = {**os.environ, **{f"EMULATED_GPU_{name}": str(value) for name, value in settings.items()}}
    return subprocess.run(
        [sys.executable, "-c", PROLOGUE + program], env=environment, capture_output=True, text=True, check=False
    )


def run(program: str, **settings: object) -> None:
    """Run ``program`` as `end` does; it must succeed."""
    done = end(program, **settings)
    assert done.returncode == 0, done.stderr
