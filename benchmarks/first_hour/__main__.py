"""Runs the first hour on a GPU: ``python -m benchmarks.first_hour``.

Each part runs in a process of its own and is ended after ten minutes. The same command goes on where it was stopped:
parts that have ended are not run again with the same code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_hour.page import page
from benchmarks.first_hour.parts import Part, parts
from lmswap.bench.compact import to_json
from lmswap.bench.console import make_console
from lmswap.bench.unet3d.study import describe_machine
from lmswap.hardware.device import describe_device

LIMIT_SECONDS = 600.0
SCHEMA = "lmswap.first_hour/1"
DONE = "done"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is still to do; 0 if all parts ended well, 2 without a GPU."""
    arguments, console = _parser().parse_args(argv), make_console()
    if not torch.cuda.is_available():
        console.print("There is no GPU here; DEVICE=emulated rehearses on an emulated one.")
        return 2
    machine, device = describe_machine(), describe_device(torch.device("cuda", 0))
    origin = {"device": device.name, "driver": device.driver, "torch": machine.torch, "commit": machine.commit}
    name = f"first_hour_{re.sub('[^a-z0-9]+', '_', device.name.lower())}"
    results, written = arguments.results / f"{name}.json", arguments.results / f"{name}.md"
    chosen = [part for part in parts(arguments.output, *arguments.sizes) if part.name in (arguments.parts or part.name)]
    arguments.results.mkdir(parents=True, exist_ok=True)
    ended, found = _before(results, origin)
    for part in chosen:
        if ended.get(part.name, {}).get("outcome") == DONE:
            console.print(f"[dim]{part.title}: done before[/]")
            continue
        console.rule(part.title)
        ended[part.name] = _run(part, arguments.limit)
        found[part.name] = json.loads(part.result.read_text()) if part.result.exists() else None
        console.print(f"{ended[part.name]['outcome']}, {ended[part.name]['seconds']:.0f} s", highlight=False)
        results.write_text(to_json({"schema": SCHEMA, "origin": origin, "parts": ended, "found": found}))
        written.write_text(page(origin, ended, found))
    console.print(f"Written: {results}, {written}", highlight=False)
    return int(any(ended[part.name]["outcome"] != DONE for part in chosen))


def _before(results: Path, origin: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """How parts ended, and what they found, in an earlier run of the same code on the same device."""
    if results.exists():
        before = json.loads(results.read_text())
        if before["origin"] == origin:
            return before["parts"], before["found"]
    return {}, {}


def _run(part: Part, limit_seconds: float) -> dict[str, Any]:
    part.result.parent.mkdir(parents=True, exist_ok=True)
    started, log = time.perf_counter(), part.result.with_suffix(".log")
    with log.open("w") as output:
        command = [sys.executable, *part.command]
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(limit_seconds)
            outcome = DONE if code == 0 else f"exit status {code}, see {log.name}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # what it has started too
            child.wait()
            outcome = f"ended after {limit_seconds:.0f} s"
    return {"title": part.title, "outcome": outcome, "seconds": time.perf_counter() - started}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour", description=__doc__)
    parser.add_argument("--sizes", nargs=2, type=int, default=(144, 192), metavar="N", help="(144 192)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="of a part (600)")
    parser.add_argument("--output", type=Path, default=Path("first-hour-output"), help="for what the parts write")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results", help="for JSON and page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
