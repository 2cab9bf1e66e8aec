"""The tests of the GPU, one after another in one process; where a test ends that process, the next ones get another.

``python -m benchmarks.first_hour.suite FILE TESTS``. Tests whose outcome FILE has are skipped, except for failed
ones, which are run after all others. ``--seconds`` is what each may take.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.compact import to_json
from benchmarks.unet3d.files import write_text
from lmswap.reporting.text import print_result

_HOW = ("-m", "pytest", "--device", "cuda", "-p", "no:cacheprovider")
_OUTCOME = re.compile(r"(\S+::.+?) (PASSED|SKIPPED|FAILED|ERROR|XFAIL|XPASS)\b")
_KINDS = {"PASSED": "passed", "XFAIL": "passed", "SKIPPED": "skipped"}
_NUM_REASON_CHARACTERS = 2000


def run(path: Path, tests: Sequence[str], max_seconds: float, marks: str = "") -> int:
    """Run what ``path`` has no outcome of, and write each outcome there; 0 if there are tests and none failed."""
    text = "".join(_lines([*_HOW, "--collect-only", "-q", "-m", marks, *tests], max_seconds))
    names = [line for line in text.splitlines() if "::" in line]
    if not names or "error" in text.splitlines()[-1]:
        print_result(f"no tests: {text}")
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text())["tests"] if path.exists() else []
    found = {test["test"]: test for test in known if test["test"] in names}
    failed = [name for name, test in found.items() if test["outcome"] == "failed"]
    to_do = [name for name in names if name not in found] + failed
    while to_do:
        for outcome in _outcomes(to_do, max_seconds, path.with_suffix(".log")):
            to_do.remove(outcome["test"])
            found[outcome["test"]] = outcome
            write_text(path, to_json({"collected": len(names), "tests": [*found.values()]}))
            print_result(f"{outcome['test']} {outcome['outcome']}, {outcome['seconds']:.1f} s; {len(to_do)} to do")
    return int(any(test["outcome"] == "failed" for test in found.values()))


def _outcomes(names: Sequence[str], max_seconds: float, log: Path) -> Iterator[dict[str, Any]]:
    """How tests ended that one process runs; a test that ends the process, or takes too long, is its last, failed."""
    left, text, started = list(names), [], time.perf_counter()
    with log.open("a") as written:
        for line in _lines([*_HOW, "-v", "--tb=short", *names], max_seconds):
            written.write(line)
            written.flush()
            text.append(line)
            match = _OUTCOME.match(line)
            if match and match[1] in left:
                left.remove(match[1])
                seconds, started = time.perf_counter() - started, time.perf_counter()
                yield {"test": match[1], "outcome": _KINDS.get(match[2], "failed"), "seconds": seconds}
    if left:
        seconds = time.perf_counter() - started
        reason = "".join(text)[-_NUM_REASON_CHARACTERS:]
        yield {"test": left[0], "outcome": "failed", "seconds": seconds, "end": reason}


def _lines(arguments: Sequence[str], max_seconds: float) -> Iterator[str]:
    """What a Python process prints; it is ended, with all that it started, if it is silent for ``max_seconds``."""
    with subprocess.Popen(
        [sys.executable, "-u", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        assert process.stdout is not None

        def end() -> None:
            with suppress(ProcessLookupError):  # what it has started would hold the device, and the pipe
                os.killpg(process.pid, signal.SIGKILL)

        while True:
            timer = threading.Timer(max_seconds, end)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            yield line
        end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour.suite", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("-m", dest="marks", default="", help="expression of markers, as pytest's")
    parser.add_argument("--seconds", type=float, default=120)
    asked = parser.parse_args()
    sys.exit(run(asked.file, asked.tests, asked.seconds, asked.marks))
