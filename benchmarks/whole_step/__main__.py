"""Plans whole steps of models that are never allocated, beside schedules of other tools.

    python -m benchmarks.whole_step --models 14b-lora --batches 1x1024 2x4096 --machines h100_sxm --budgets 24GiB

Every figure is a prediction by rooflines, of the operators that torch traces on this machine. Ratios are to a device
without a limit; null where a schedule does not fit the budget, or moves nothing that the model has. Results, and a page
of them, are written after each row; rows that the file has from earlier runs stay in it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compact import to_json
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.whole_step.models import MODELS, example, variants
from benchmarks.whole_step.peers import PEERS, Setup, best_plan
from benchmarks.whole_step.table import render
from lmswap import dry_run
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.analyze.training_step import optimizer_called, training_step
from lmswap.errors import PlanInfeasible
from lmswap.ir.bytesize import parse_bytes
from lmswap.ir.machine import Machine
from lmswap.ir.program import SHARED_KINDS, Program
from lmswap.planner import make_plan
from lmswap.reporting.text import print_result

RESULTS = Path(__file__).parents[1] / "results" / "whole_step.json"
MACHINES = Path(__file__).with_name("machines")
_MIN_SWAP_BYTES = 2**20
_MIN_LEAD = 5e-4  # of ratios: less is no difference in the page
_OPTIMIZER = optimizer_called("adamw")
_SOCKET_BYTES_PER_SECOND = 300e9  # of the memory that CPU Adam reads and writes
_HOST_BYTES_PER_SECOND = {"gh200": 450e9}


def main(arguments: list[str] | None = None) -> int:
    """Plan what ``arguments`` name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_step", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["14b-lora"], metavar="NAME")
    parser.add_argument(
        "--batches",
        nargs="+",
        default=["2x4096"],
        metavar="COUNTxSIZE",
        help="sequences x tokens, images x side, volumes x side",
    )
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--machines", nargs="+", choices=sorted(p.stem for p in MACHINES.glob("*.json")))
    parser.add_argument("--budgets", nargs="+", default=["24GiB"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    return run_to_end("whole step", partial(plan_rows, options))


def plan_rows(options: argparse.Namespace) -> int:
    """Plan, print and store one row for each model, batch, machine and budget; return the exit code."""
    rows = json.loads(options.output.read_text()) if options.output.exists() else {}
    for model in options.models:
        for batch in options.batches:
            started = time.process_time()
            steps = _steps(model, batch, options.micro_batches)
            tracing_seconds = time.process_time() - started
            for machine in options.machines or ["h100_sxm"]:
                for budget in options.budgets:
                    row = {"tracing_cpu_seconds": tracing_seconds, **_row(steps, machine, parse_bytes(budget))}
                    name = f"{model}, {options.micro_batches} micro-batches of {batch}, {machine}, {budget}"
                    rows[name] = row
                    write_text(options.output, to_json(rows))
                    write_text(options.output.with_suffix(".md"), render(rows))
                    print_result(f"{name}: {json.dumps(row)}")
                    for peer in row["ahead"]:
                        how = "exact" if PEERS[peer].is_exact else "CPU Adam, other bits"
                        print_result(f"{peer} is faster ({how}): {row['peers'][peer]:.3f}")
    return 0


def _steps(model: str, batch: str, micro_batches: int) -> list[Program]:
    count, size = map(int, batch.split("x"))
    programs = [dry_run(make, example(model, count, size), device="cpu") for make in variants(model, size)]
    return [training_step(program, _OPTIMIZER, micro_batches=micro_batches) for program in programs]


def _row(steps: Sequence[Program], machine_name: str, budget_bytes: int) -> dict[str, Any]:
    machine = Machine.from_json((MACHINES / f"{machine_name}.json").read_text())
    step = steps[0]
    costs = roofline(step, machine)
    limits = {"budget_bytes": budget_bytes, "min_swap_bytes": _MIN_SWAP_BYTES}
    row: dict[str, Any] = {
        "ops": len(step.ops),
        "bytes": {str(kind): step.bytes_of(kind) for kind in SHARED_KINDS},
        "unlimited_bytes": StepMemory(step, costs).peak.nbytes,
        "unlimited_seconds": costs.free_seconds,
    }
    started = time.process_time()
    try:
        plan = make_plan("auto", step, costs, machine, tier="host", **limits)
    except PlanInfeasible as refusal:
        row["needed_bytes"] = refusal.needed_bytes
    else:
        bound_seconds = plan.certificate.seconds if plan.certificate else costs.free_seconds
        row |= {
            "ratio": plan.predicted_seconds / costs.free_seconds,
            "bound_ratio": bound_seconds / costs.free_seconds,
            "peak_bytes": plan.predicted_peak_bytes,
            "host_bytes": sum(plan.tier_bytes.values()),
            "planning_cpu_seconds": time.process_time() - started,
        }
    host_rate = _HOST_BYTES_PER_SECOND.get(machine_name, _SOCKET_BYTES_PER_SECOND)
    setup = Setup(_OPTIMIZER, machine, host_rate, _MIN_SWAP_BYTES)
    row["peers"] = ratios = {}
    for name, peer in PEERS.items():
        best = best_plan(peer, steps, setup, budget_bytes)
        ratios[name] = best and best.plan.predicted_seconds / costs.free_seconds
    row["ahead"] = [name for name, ratio in ratios.items() if ratio and ratio < row.get("ratio", math.inf) - _MIN_LEAD]
    return row


if __name__ == "__main__":
    sys.exit(main())
