"""Plain torch against torch on the heap, in alternating processes: `python -m benchmarks.heap [--json PATH]`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.console import make_console
from benchmarks.heap.step import StepRun
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from lmswap.hardware.device import describe_device
from lmswap.reporting.text import print_result

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 2  # the first sizes the heap, the second meets Adam's state


def measure(size: int, num_steps: int, threshold_bytes: int) -> StepRun:
    """Runs `benchmarks.heap.step` in a fresh process; a session of its own hears no Ctrl-C, and is ended by it here."""
    command = [sys.executable, "-m", "benchmarks.heap.step", str(size), str(num_steps), str(threshold_bytes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    return StepRun(**json.loads(done.stdout))


def summarize(runs: list[StepRun]) -> dict[str, float]:
    """Medians over the steps after warm-up, with the range of their seconds; the highest of the peaks."""
    steps = [
        step
        for run in runs
        for step in list(zip(run.seconds, run.system_seconds, run.faults, strict=True))[WARM_UP_STEPS:]
    ]
    seconds, system_seconds, faults = zip(*steps, strict=True)
    return {
        "seconds": statistics.median(seconds),
        "least_seconds": min(seconds),
        "max_seconds": max(seconds),
        "system_seconds": statistics.median(system_seconds),
        "faults": statistics.median(faults),
        "peak_resident_gib": max(run.peak_resident_bytes for run in runs) / 2**30,
        "peak_live_gib": max(run.peak_live_bytes for run in runs) / 2**30,
    }


def make_table(summaries: dict[str, dict[str, float]]) -> Table:
    """One row for each size and way of allocating."""
    table = Table(title="3D U-Net, fp32, forward + backward + Adam")
    for heading in ("", "s/step", "(range)", "system s", "faults/step", "resident GiB", "live GiB"):
        table.add_column(heading, justify="right")
    for label, row in summaries.items():
        table.add_row(
            label,
            f"{row['seconds']:.2f}",
            f"{row['least_seconds']:.2f}–{row['max_seconds']:.2f}",
            f"{row['system_seconds']:.2f}",
            f"{row['faults']:,.0f}",
            f"{row['peak_resident_gib']:.3f}",
            f"{row['peak_live_gib']:.3f}" if row["peak_live_gib"] else "",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes all figures with the machine and the commit on request.

    1 if losses differ, 2 if the figures cannot be written, 130 for Ctrl-C.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96])
    parser.add_argument("--steps", type=int, default=5, help=f"per process, of which {WARM_UP_STEPS} are warm-up")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each kind")
    parser.add_argument("--threshold-bytes", type=int, default=64 * 1024)
    parser.add_argument("--json", type=Path, help="where to write the figures, as in benchmarks/results/heap.json")
    arguments = parser.parse_args(argv)
    if arguments.steps <= WARM_UP_STEPS or arguments.repeats < 1 or arguments.threshold_bytes < 1:
        parser.error(f"--steps must exceed {WARM_UP_STEPS}; --repeats and --threshold-bytes must be at least 1")
    return run_to_end("heap", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    runs: dict[str, list[StepRun]] = {}
    for size in arguments.sizes:
        for _ in range(arguments.repeats):
            for kind, threshold_bytes in (("plain", 0), ("heap", arguments.threshold_bytes)):
                runs.setdefault(f"{size}³ {kind}", []).append(measure(size, arguments.steps, threshold_bytes))
        losses = {run.loss for kind in ("plain", "heap") for run in runs[f"{size}³ {kind}"]}
        if len(losses) > 1:
            print_result(f"losses at {size}³ differ between runs: {sorted(losses)}", sys.stderr)
            return 1
    summaries = {label: summarize(of_label) for label, of_label in runs.items()}
    make_console().print(make_table(summaries))

    if arguments.json is not None:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        figures = {
            "machine": asdict(describe_device(torch.device("cpu"))),
            "commit": commit.stdout.strip(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "threshold_bytes": arguments.threshold_bytes,
            "summaries": summaries,
            "runs": {label: [asdict(run) for run in of_label] for label, of_label in runs.items()},
        }
        write_text(arguments.json, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
