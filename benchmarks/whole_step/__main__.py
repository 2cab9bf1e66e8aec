"""Plans whole steps of decoders that are never allocated, beside block swap: `python -m benchmarks.whole_step`.

    python -m benchmarks.whole_step --models 14b-lora --batches 1x1024 2x4096 --machines h100_sxm --budgets 24GiB

Every figure is a prediction by rooflines, of the operators that torch traces on this machine. Results are written after
each row; rows that the file has from earlier runs stay in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compact import to_json
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.whole_step.block_swap import plan_block_swap
from benchmarks.whole_step.decoders import SIZES, maker
from lmswap import dry_run
from lmswap.analyze.cost import roofline
from lmswap.analyze.training_step import optimizer_called, training_step
from lmswap.errors import PlanInfeasible
from lmswap.ir.bytesize import parse_bytes
from lmswap.ir.machine import Machine
from lmswap.ir.program import BufferKind, Program
from lmswap.planner import make_plan
from lmswap.reporting.text import print_result

RESULTS = Path(__file__).parents[1] / "results" / "whole_step.json"
MACHINES = Path(__file__).with_name("machines")
_MIN_SWAP_BYTES = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Plan what ``arguments`` name; return the exit code."""
    models = [f"{size}{kind}" for size in SIZES for kind in ("", "-lora")]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_step", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models, default=["14b-lora"], metavar="NAME")
    parser.add_argument("--batches", nargs="+", default=["2x4096"], metavar="SEQUENCESxTOKENS")
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
            step = _step(model, batch, options.micro_batches)
            tracing_seconds = time.process_time() - started
            for machine in options.machines or ["h100_sxm"]:
                for budget in options.budgets:
                    row = {"tracing_cpu_seconds": tracing_seconds, **_row(step, machine, parse_bytes(budget))}
                    name = f"{model}, {options.micro_batches} micro-batches of {batch}, {machine}, {budget}"
                    rows[name] = row
                    write_text(options.output, to_json(rows) + "\n")
                    print_result(f"{name}: {json.dumps(row)}")
    return 0


def _step(model: str, batch: str, micro_batches: int) -> Program:
    tokens = torch.empty(tuple(map(int, batch.split("x"))), dtype=torch.int64, device="meta")
    program = dry_run(maker(model), tokens, device="cpu")
    return training_step(program, optimizer_called("adamw"), micro_batches=micro_batches)


def _row(step: Program, machine_name: str, budget_bytes: int) -> dict[str, Any]:
    machine = Machine.from_json((MACHINES / f"{machine_name}.json").read_text())
    costs = roofline(step, machine)
    kinds = (BufferKind.WEIGHT, BufferKind.SUMMED_GRADIENT, BufferKind.OPTIMIZER_STATE)
    row: dict[str, Any] = {
        "ops": len(step.ops),
        "bytes": {str(kind): step.bytes_of(kind) for kind in kinds},
        "unlimited_seconds": costs.free_seconds,
    }
    block_swap = plan_block_swap(step, costs, machine, budget_bytes=budget_bytes, min_swap_bytes=_MIN_SWAP_BYTES)
    row["block_swap_ratio"] = block_swap and block_swap.predicted_seconds / costs.free_seconds
    started = time.process_time()
    try:
        limits = {"budget_bytes": budget_bytes, "min_swap_bytes": _MIN_SWAP_BYTES}
        plan = make_plan("auto", step, costs, machine, tier="host", **limits)
    except PlanInfeasible as refusal:
        return row | {"needed_bytes": refusal.needed_bytes}
    bound_seconds = plan.certificate.seconds if plan.certificate else costs.free_seconds
    return row | {
        "ratio": plan.predicted_seconds / costs.free_seconds,
        "bound_ratio": bound_seconds / costs.free_seconds,
        "peak_bytes": plan.predicted_peak_bytes,
        "host_bytes": sum(plan.tier_bytes.values()),
        "planning_cpu_seconds": time.process_time() - started,
    }


if __name__ == "__main__":
    sys.exit(main())
