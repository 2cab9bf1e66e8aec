"""Predictions for the case study's machines: the simulator on stored steps of the U-Net, without a machine.

The V100s compute at 12 % of their peak rate, at which a step of 192³ takes the 1.9 s that the case study's epochs give;
their links have the rates that it measured. The H200 and the GH200 are rooflines (30 % of peak in convolutions).
"""

from __future__ import annotations

from typing import Any

from benchmarks.case_study.results import Prediction, Predictions
from benchmarks.programs.corpus import load_machine, load_program
from benchmarks.programs.replay import MIN_SWAP_BYTES
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program
from lmswap.planner import make_plan, simulate
from lmswap.profiling.figures import figures_of

MACHINES = ("v100_gen3", "v100_nvlink2", "h200_gen5", "gh200")
MACHINE_OF_SYSTEM = {"x86": "v100_gen3", "ac922": "v100_nvlink2"}
SMALL, FUSED, AS_IN_KERAS = "unet3d_144", "unet3d_192", "unet3d_192_unfused"
OURS, FIRST_TFLMS = "lmswap", "TFLMS of 2018"
# TFLMS as it was in 2018: whatever has a consumer more than one level below is swapped for each of them, the
# copy in starts a level before it is needed, and compute waits for every copy.
_FIRST_TFLMS = {"swapout_threshold": 1, "swapin_ahead": 1, "swapin_groupby": 1, "sync_mode": 3}


def predict() -> Predictions:
    """192³ on every machine: by lmswap in what 144³ needs there, and by IBM's method of 2018, which knew no budget.

    IBM's network wrote its norms out as many ops, as Keras does; ours has them fused.
    """
    small, fused, as_in_keras = (load_program(name) for name in (SMALL, FUSED, AS_IN_KERAS))
    found = []
    for name in MACHINES:
        machine = load_machine(name)
        budget_bytes = StepMemory(small, roofline(small, machine)).peak.nbytes
        found.append(_predict(fused, name, machine, OURS, budget_bytes))
        found.append(_predict(as_in_keras, name, machine, FIRST_TFLMS, None, **_FIRST_TFLMS))
    return Predictions(tuple(found))


def _predict(
    program: Program, name: str, machine: Machine, method: str, budget_bytes: int | None, **parameters: Any
) -> Prediction:
    costs, tier = roofline(program, machine), machine.tiers[0].name
    limits: dict[str, Any] = {"tier": tier, "min_swap_bytes": MIN_SWAP_BYTES}
    unlimited_bytes = StepMemory(program, costs).peak.nbytes
    policy = "auto" if method == OURS else "tflms"
    plan = make_plan(
        policy, program, costs, machine, budget_bytes=budget_bytes or unlimited_bytes, **limits, **parameters
    )
    timeline = simulate(program, costs, machine, plan)
    figures = figures_of(timeline)
    return Prediction(
        program=program.name,
        machine=name,
        machine_name=machine.name,
        method=method,
        budget_bytes=budget_bytes,
        step_seconds=plan.predicted_seconds,
        free_seconds=costs.free_seconds,
        bound_seconds=plan.certificate.seconds if plan.certificate else 0.0,
        utilization=figures.utilization,
        out_bytes=figures.copies_out.nbytes,
        in_bytes=figures.copies_in.nbytes,
        out_bytes_per_second=figures.copies_out.bytes_per_second,
        in_bytes_per_second=figures.copies_in.bytes_per_second,
        spans=timeline.spans if method == OURS and name in MACHINE_OF_SYSTEM.values() else (),
    )
