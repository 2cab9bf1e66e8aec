"""Compares predicted steps with those of an emulated H200: ``.venv-gpu/bin/python -m benchmarks.emulated``.

Each training runs in a process of its own, one after the other; kernels' times are the set device's, not the cores'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compact import to_json
from benchmarks.console import make_console
from benchmarks.emulated.device import slowed
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from tools.emulated_gpu import machine

SCHEMA = "lmswap.emulated/1"
_SHARES = (0.7, 0.5)
_RESULTS = Path(__file__).parents[1] / "results"
_SMALL, _LARGE = "unet3d_48", "unet3d_64"
_COLUMNS = (
    *("network", "budget", "emulated, s", "predicted", "off by", "first", "off by"),
    *("over unlimited", "swapped", "again", "host, s", "late"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all of them, or those of the named networks; 0, 2 for what cannot be used, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_to_end("emulated", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    runs = _Runs()
    for network in arguments.networks:
        free = runs.add(network, "unlimited", None)
        for share in _SHARES:
            runs.add(network, f"{share:.0%}", int(free["fixed_bytes"] + share * free["planned_bytes"]))
        if network == _SMALL:
            runs.add(_LARGE, f"{_SMALL}'s peak", free["fixed_bytes"] + free["planned_bytes"])
    machine.start()
    origin = {"host": asdict(describe_machine()), "emulated": json.loads(slowed().to_json())}
    found = to_json({"schema": SCHEMA, "origin": origin, "runs": runs.done})
    write_text(arguments.results / "emulated_h200.json", found)
    write_text(arguments.results / "emulated_h200.md", page(origin, runs.done))
    return 0


class _Runs:
    """The runs so far; each is printed as it ends."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._console = make_console()

    def add(self, network: str, budget: str, budget_bytes: int | None) -> dict[str, Any]:
        """Runs ``network`` within ``budget_bytes`` (None: "auto"), named ``budget`` in the table."""
        run = {"network": network, "budget": budget, **_fresh(network, budget_bytes)}
        self.done.append(run)
        self._console.print(row(run), highlight=False, soft_wrap=True)
        return run


def _fresh(network: str, budget_bytes: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "run.json"
        command = [sys.executable, "-m", "benchmarks.emulated.train", str(result), network, json.dumps(budget_bytes)]
        subprocess.run(command, check=True, start_new_session=True)  # of Ctrl-C only this process hears
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def page(origin: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of all runs in Markdown."""
    host, emulated = origin["host"], origin["emulated"]
    lines = [
        "# Predicted steps beside those of an emulated GPU",
        "",
        f"**Emulated, not measured on a GPU**: {emulated['name']}, on {host['cpu']}, {host['cores']} cores; torch "
        f"{host['torch']}, commit {host['commit']}. Seconds of forward and backward, on the emulated device's clock; "
        "medians of the steady steps, the least and the most in brackets. *First* is what was predicted before a step "
        "had run; *host* what the host took to queue the step, on cores that others used too; *late* the share of the "
        "step that kernels took longer than set, as cores are no faster.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
        *map(row, runs),
    ]
    return "\n".join(lines) + "\n"


def row(run: Mapping[str, Any]) -> str:
    """A row of the table for ``run``."""
    steps = run["steady"]
    seconds = [step["emulated_seconds"] for step in steps]
    emulated, last, first = statistics.median(seconds), steps[-1], run["steps"][0]
    swapped, again = (f"{(last[key] or 0) / 2**20:.0f} MiB" for key in ("swapped_bytes", "recomputed_bytes"))
    late = statistics.median(step["late_seconds"] for step in steps) / emulated
    cells = (
        run["network"],
        run["budget"],
        f"{emulated:.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
        f"{last['predicted_seconds']:.3f}",
        f"{last['predicted_seconds'] / emulated - 1:+.1%}",
        f"{first['predicted_seconds']:.3f}",
        f"{first['predicted_seconds'] / emulated - 1:+.1%}",
        f"{emulated / run['free_seconds'] - 1:+.1%}",
        swapped,
        again,
        f"{statistics.median(step['host_seconds'] for step in steps):.3f}",
        f"{late:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated", description=__doc__)
    parser.add_argument("--networks", nargs="+", default=[_SMALL, "gpt"], metavar="NETWORK", help=f"({_SMALL} gpt)")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="for JSON and table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
