"""Do the tests of the GPU pass, each in a process of its own? One that breaks the device breaks no other.

``python -m benchmarks.first_hour.suite FILE TESTS``. Tests that FILE has the outcome of run no more, but those that
failed, which are tried again after all others. ``--seconds`` is what each may take. Several run beside each other where
there are cores for it: half of what a test takes is the start of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from lmswap.bench.compact import to_json
from lmswap.bench.unet3d.files import write_text
from lmswap.reporting.text import print_result

_MOST_AT_ONCE, _CORES_EACH = 4, 4
_HOW = ("-m", "pytest", "--device", "cuda", "-q", "-p", "no:cacheprovider")


def run(path: Path, tests: Sequence[str], most_seconds: float, num_at_once: int) -> int:
    """Runs what ``path`` does not know yet, and keeps each outcome there; 0 if there are tests and none failed."""
    code, text = _pytest(most_seconds, "--collect-only", *tests)
    names = [line for line in text.splitlines() if "::" in line]
    if code != 0 or not names:
        print_result(f"no tests: {text}")
        return 1
    known = json.loads(path.read_text())["tests"] if path.exists() else []
    found = {test["test"]: test for test in known if test["test"] in names}
    failed = [name for name, test in found.items() if test["outcome"] == "failed"]
    to_do = [name for name in names if name not in found] + failed
    with ThreadPoolExecutor(num_at_once) as pool:
        running = {pool.submit(_outcome, name, most_seconds): name for name in to_do}
        for number, ended in enumerate(as_completed(running), 1):
            name = running[ended]
            found[name] = ended.result()
            write_text(path, to_json({"collected": len(names), "tests": [*found.values()]}))
            print_result(f"{number} of {len(to_do)}: {name} {found[name]['outcome']}, {found[name]['seconds']:.1f} s")
    return int(any(test["outcome"] == "failed" for test in found.values()))


def _outcome(name: str, most_seconds: float) -> dict[str, object]:
    """How a test ended: "passed", "skipped" or "failed", with the end of what it printed."""
    started = time.perf_counter()
    code, text = _pytest(most_seconds, name)
    last = text.strip().splitlines()[-1:] or [""]
    outcome = "failed" if code != 0 else "skipped" if "skipped" in last[0] else "passed"
    seconds = time.perf_counter() - started
    return {"test": name, "outcome": outcome, "seconds": seconds, "end": last[0] if code == 0 else text[-2000:]}


def _pytest(most_seconds: float, *arguments: str) -> tuple[int | None, str]:
    """Exit status, None if it took too long, and what was printed."""
    command = [sys.executable, *_HOW, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        try:
            text, _ = process.communicate(timeout=most_seconds)
        except subprocess.TimeoutExpired:
            text = f"took more than {most_seconds:g} s"
        with suppress(ProcessLookupError):  # what it has started would hold the device, and the pipe
            os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour.suite", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--seconds", type=float, default=120)
    asked = parser.parse_args()
    num_at_once = max(1, min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) // _CORES_EACH))
    sys.exit(run(asked.file, asked.tests, asked.seconds, num_at_once))
