"""Quality and planning time of plans: programs × machines × budgets × policies → an outcome each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.baselines import BASELINES, plan_baseline
from benchmarks.programs.corpus import load_machine, load_program
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible, TierError
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Decision
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.planner import make_plan

MIN_SWAP_BYTES = 2**20
_MANY_OPS = 10_000
_BUDGET_OF_MANY_OPS = 50  # so long a program is there for the planning time; its other budgets teach nothing new


@dataclass(frozen=True)
class Case:
    """What is planned. The budget is in per cent of the peak that the program has when every buffer is kept."""

    program: str
    machine: str
    budget_percent: int
    policy: str

    def __str__(self) -> str:
        return f"{self.program} on {self.machine} at {self.budget_percent} %, policy {self.policy}"


@dataclass(frozen=True)
class Outcome:
    """What came out, by the machine's rates. ``plan`` is None where the policy found none that fits."""

    case: Case
    budget_bytes: int
    free_seconds: float  # of the step with unlimited memory
    planning_seconds: float
    plan: PlanFigures | None


@dataclass(frozen=True)
class PlanFigures:
    """A plan in numbers; the bytes are of distinct buffers of the program."""

    policy: str  # as the plan says it: auto names the policy that it took
    step_seconds: float
    bound_seconds: float
    peak_bytes: int
    swapped_bytes: int
    recomputed_bytes: int


def replay(
    programs: Sequence[str],
    machines: Sequence[str],
    budget_percents: Sequence[int],
    policies: Sequence[str],
) -> Iterator[Outcome]:
    """Plan every program for every machine of its number type, at every budget, with every policy or baseline.

    Args:
        programs: names of stored programs.
        machines: names of stored machines.
        budget_percents: budgets as percentages of a program's unplanned peak; programs of many ops have one of their
            own.
        policies: names of policies and of baselines.

    Yields:
        The outcome of each case; a refused plan is one, too.
    """
    for program_name in programs:
        program = load_program(program_name)
        percents = budget_percents if len(program.ops) < _MANY_OPS else [_BUDGET_OF_MANY_OPS]
        for machine_name in machines:
            if program_name.endswith("_bf16") != machine_name.endswith("_bf16"):
                continue  # a machine's rate of computing is that of one number type
            machine = load_machine(machine_name)
            for percent in percents:
                for policy in policies:
                    yield plan_case(Case(program_name, machine_name, percent, policy), program, machine)


def plan_case(case: Case, program: Program, machine: Machine) -> Outcome:
    """Plan one case of ``program`` on ``machine``; see `replay`."""
    costs = roofline(program, machine)
    budget_bytes = StepMemory(program, costs).peak.nbytes * case.budget_percent // 100
    limits: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "tier": machine.tiers[0].name,
        "min_swap_bytes": MIN_SWAP_BYTES,
    }
    started = time.perf_counter()
    try:
        make = plan_baseline if case.policy in BASELINES else make_plan
        plan = make(case.policy, program, costs, machine, **limits)
    except (PlanInfeasible, TierError):
        plan = None
    planning_seconds = time.perf_counter() - started
    figures = None
    if plan is not None:
        decisions = schedule(program, plan.recomputes).decisions(plan)
        nbytes = dict.fromkeys(Decision, 0)
        for buffer, decision in zip(program.buffers, decisions, strict=True):
            nbytes[decision] += buffer.nbytes
        figures = PlanFigures(
            policy=plan.policy,
            step_seconds=plan.predicted_seconds,
            bound_seconds=plan.certificate.seconds if plan.certificate else 0.0,
            peak_bytes=plan.predicted_peak_bytes,
            swapped_bytes=nbytes[Decision.SWAP],
            recomputed_bytes=nbytes[Decision.RECOMPUTE],
        )
    return Outcome(case, budget_bytes, costs.free_seconds, planning_seconds, figures)
