"""Do the tests of the GPU pass, each in a process of its own? One that breaks the device breaks no other.

``python -m benchmarks.first_hour.suite FILE TESTS``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmswap.bench.compact import to_json

_LIMIT_SECONDS = 120
_HOW = ("-m", "pytest", "--device", "cuda", "-q", "-p", "no:cacheprovider")


def collect(tests: Sequence[str]) -> list[str]:
    """Their names."""
    done = _run("--collect-only", *tests)
    return [line for line in done.stdout.splitlines() if "::" in line]


def outcomes(names: Iterable[str]) -> list[dict[str, object]]:
    """How each ended: "passed", "skipped", or the end of what it printed."""
    found: list[dict[str, object]] = []
    for name in names:
        started = time.perf_counter()
        try:
            done = _run(name)
            end = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
            outcome = "failed" if done.returncode else "skipped" if "skipped" in end[0] else "passed"
            text = done.stdout[-2000:] if done.returncode else end[0]
        except subprocess.TimeoutExpired:
            outcome, text = "failed", f"took more than {_LIMIT_SECONDS} s"
        found.append({"test": name, "outcome": outcome, "seconds": time.perf_counter() - started, "end": text})
    return found


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *_HOW, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(to_json({"tests": outcomes(collect(sys.argv[2:]))}))
