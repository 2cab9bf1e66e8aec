"""Completes a plan: swaps with positions → tier offsets and prediction."""

from __future__ import annotations

from collections.abc import Sequence

from lmswap.errors import TierError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.planner.memory.pack_tier import assign_offsets
from lmswap.planner.problem import Problem


def build_plan(problem: Problem, policy: str, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> Plan:
    """The plan of ``recomputes`` and ``swaps``, with its offsets, tier capacity and predicted cost.

    Raises:
        TierError: the tier is too small for the host copies held at one time.
    """
    recomputes = tuple(recomputes)
    runs, _ = problem.with_recomputes(recomputes)
    placed, capacity_bytes = assign_offsets(runs.program, swaps)
    if capacity_bytes > problem.tier.held_bytes:
        raise TierError(
            f"policy '{policy}' would hold {format_bytes(capacity_bytes)} on tier '{problem.tier.name}', which has "
            f"{format_bytes(problem.tier.held_bytes)}; give a larger budget, or make room there"
            + ("" if problem.tier.name == "disk" else ", or use tier='disk'")
        )
    timeline = problem.timeline(placed, recomputes)
    return Plan(
        policy=policy,
        budget_bytes=problem.budget_bytes,
        swaps=placed,
        predicted_seconds=timeline.seconds,
        predicted_peak_bytes=timeline.peak_bytes,
        tier_bytes={problem.tier.name: capacity_bytes} if placed else {},
        recomputes=recomputes,
    )
