"""Counts of fuzzing: random models under random plans and delays, damaged files, and all other random examples.

    python -m benchmarks.fuzz --times 50

CI tries the same few examples each time; these are many times as many, with other seeds. The cases are those of all
tests that draw examples; this runs them and keeps what they counted. One that fails is printed as the call of its test,
to be made an `@example` of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.unet3d.commands.arguments import positive
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.reporting.text import print_result

RESULTS = Path(__file__).parent / "results" / "fuzz_cpu.json"
_MODELS, _FILES = "fuzz/test_models.py", "fuzz/test_readers.py"  # all others are of parts


def counts(output: str) -> dict[str, int]:
    """Cases that passed by test, from what hypothesis prints of its statistics."""
    parts = re.split(r"^tests/(.+::.+):$", output, flags=re.MULTILINE)[1:]
    return {
        name: sum(int(number) for number in re.findall(r"(\d+) passing", text))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def fuzz(times: int) -> tuple[int, dict[str, int]]:
    """Runs ``times`` as many cases as CI does, shown while they run; pytest's exit code, and cases by test."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "hypothesis", "--timeout", "0", "--show-capture", "no"]
    environment = {**os.environ, "LMSWAP_FUZZ": str(times)}
    lines: list[str] = []
    with subprocess.Popen(
        [*command, "--hypothesis-show-statistics"],
        cwd=Path(__file__).parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            sys.stdout.write(line)
    return process.returncode, counts("".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzzes, and writes how much, if all passed; pytest's exit code, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument(
        "--times", type=positive, default=50, metavar="N", help="as many cases as CI tries (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE", help="(%(default)s)")
    options = parser.parse_args(argv)
    return run_to_end("fuzz", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    code, cases = fuzz(options.times)
    if code:
        return code
    if not cases or not all(cases.values()):
        print_result(f"the tests passed, but what hypothesis prints of them cannot be counted: {cases}")
        return 1
    models, files = (
        sum(number for name, number in cases.items() if name.startswith(module)) for module in (_MODELS, _FILES)
    )
    parts = sum(cases.values()) - models - files
    record = {
        "machine": asdict(describe_machine()),
        "times": options.times,
        "seconds": round(time.monotonic() - started),
        "models": models,
        "files": files,
        "parts": parts,
        "cases": cases,
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    print_result(
        f"{models} random models under random plans and delays, {files} damaged files, {parts} cases of parts: "
        "all passed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
