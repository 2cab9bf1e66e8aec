"""Runs the first hour on a GPU: ``python -m benchmarks.first_hour``.

Each part runs in a process of its own and is ended at its limit. The same command resumes where it was stopped:
parts that have ended well are skipped with the same code, and what others found until then is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console

from benchmarks.compact import to_json
from benchmarks.console import make_console
from benchmarks.first_hour.page import page, summary
from benchmarks.first_hour.parts import Part, parts
from benchmarks.first_hour.session import in_session
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.hardware.device import describe_device

SCHEMA = "lmswap.first_hour/2"
DONE = "done"
_SILENT_SECONDS = 10.0  # of a part, until it is said that it still runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is still to do; 0 if all parts ended well, 1 if not.

    2 without a GPU and where results cannot be written, 130 for Ctrl-C: parts that have ended are kept.
    """
    arguments, console = _parser().parse_args(argv), make_console()
    if not torch.cuda.is_available():
        console.print("There is no GPU here; DEVICE=emulated rehearses on an emulated one.")
        return 2
    return run_to_end("first hour", lambda: _run_all(arguments, console))


def _run_all(arguments: argparse.Namespace, console: Console) -> int:
    device = describe_device(torch.device("cuda", 0))
    name = f"first_hour_{re.sub('[^a-z0-9]+', '_', device.name.lower())}"
    results, written = arguments.results / f"{name}.json", arguments.results / f"{name}.md"
    machine, sizes = describe_machine(), list(arguments.sizes)
    origin = {"driver": device.driver, "torch": machine.torch, "commit": machine.commit, "sizes": sizes}
    # What parts have left there they go on with: it has to be of the same code.
    folder = arguments.output / "-".join(map(str, (name, *sizes, machine.commit)))
    chosen = [part for part in parts(folder, *sizes) if part.name in (arguments.parts or part.name)]
    ended, found = _before(results)
    for part in chosen:
        if _is_done(ended.get(part.name), origin):
            console.print(f"[dim]{part.title}: done before[/]")
            continue
        console.rule(part.title)
        ended[part.name] = {**_run(part, arguments.limit or part.limit_seconds, console), "origin": origin}
        found[part.name] = json.loads(part.result.read_text()) if part.result.exists() else None
        ended[part.name]["summary"] = summary(part.name, found[part.name]) if found[part.name] else []
        console.print(f"{ended[part.name]['outcome']}, {ended[part.name]['seconds']:.0f} s", highlight=False)
        write_text(results, to_json({"schema": SCHEMA, "device": device.name, "parts": ended, "found": found}))
        write_text(written, page(device.name, [*ended.values()]))
    console.print(f"Written: {results}, {written}; logs are in {folder}", highlight=False, soft_wrap=True)
    return int(not all(_is_done(ended[part.name], origin) for part in chosen))


def _before(results: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """How parts ended, and what they found, in earlier runs on the same device, of whatever code."""
    if results.exists():
        before = json.loads(results.read_text())
        if before["schema"] == SCHEMA:
            return before["parts"], before["found"]
    return {}, {}


def _is_done(ended: Mapping[str, Any] | None, origin: Mapping[str, Any]) -> bool:
    return ended is not None and ended["outcome"] == DONE and ended["origin"] == origin


def _run(part: Part, limit_seconds: float, console: Console) -> dict[str, Any]:
    part.result.parent.mkdir(parents=True, exist_ok=True)
    started, log = time.monotonic(), part.result.with_suffix(".log")
    with (
        log.open("w") as output,
        log.open(errors="replace") as written,
        in_session([sys.executable, "-u", *part.command], output) as child,
    ):
        code = _follow(child, written, limit_seconds, console)
    outcome = DONE if code == 0 else f"exit status {code}, see {log.name}"
    if code is None:
        outcome = f"ended after {limit_seconds:.0f} s"
    return {"title": part.title, "outcome": outcome, "seconds": time.monotonic() - started}


def _follow(child: subprocess.Popen[bytes], written: TextIO, limit_seconds: float, console: Console) -> int | None:
    """Shows what the child writes, and that it runs while it writes nothing; its exit status, None if it is late."""
    started = shown = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.5)
        now = time.monotonic()
        if text := written.read():
            console.out(text, end="", highlight=False)
            shown = now
        elif now - shown > _SILENT_SECONDS:
            console.print(f"[dim]... {now - started:.0f} s[/]", highlight=False)
            shown = now
        if child.returncode is not None or now - started > limit_seconds:
            return child.returncode


def _parser() -> argparse.ArgumentParser:
    names = [part.name for part in parts(Path(), 0, 0)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour", description=__doc__)
    parser.add_argument("--sizes", nargs=2, type=int, default=(144, 192), metavar="N", help="(144 192)")
    parser.add_argument(
        "--parts", nargs="+", choices=names, metavar="PART", help=f"only these, of {', '.join(names)} (all)"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each part, instead of its own")
    parser.add_argument("--output", type=Path, default=Path("first-hour-output"), help="for what the parts write")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results", help="for JSON and page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
