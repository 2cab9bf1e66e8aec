"""The refusal of a baseline that does not fit a budget."""

from __future__ import annotations

from collections.abc import Sequence

from lmswap.errors import PlanInfeasible
from lmswap.ir.plan import Recompute
from lmswap.planner.problem import Problem


def infeasible(problem: Problem, policy: str, recomputes: Sequence[Recompute]) -> PlanInfeasible:
    """The error with the budget that ``policy`` needs with ``recomputes`` and no swaps, and where its peak is."""
    runs, memory = problem.memory.with_recomputes(recomputes)
    peak = memory.peak
    return PlanInfeasible(
        budget_bytes=problem.budget_bytes,
        needed_bytes=peak.nbytes,
        where=f"op {runs.ops[peak.op]} {runs.program.ops[peak.op].title}",
        live=peak.live,
        policy=policy,
    )
