"""The part of an optimizer's state that streams: of some shares, that with which step and update take least."""

from __future__ import annotations

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Link
from lmswap.ir.program import Program
from lmswap.session.allowance import Allowance
from lmswap.session.optimizer_state import OptimizerState
from lmswap.session.plan_store import StepPlans

_SHARES = (0.25, 0.5, 0.75, 1.0)
_WORTH_STREAMING = 0.02  # of the step's seconds: less is within the error of predictions


def streamed_bytes(
    plans: StepPlans,
    state: OptimizerState,
    program: Program,
    costs: OpCosts,
    allowance: Allowance,
    *,
    tier: str,
    planned_seconds: float,
) -> int | None:
    """Return the bytes of ``state`` to stream to ``tier``; None if more than now gain nothing.

    An update is assumed in each step, and that its copies run beside each other, but not beside the step.

    Args:
        plans: of the model.
        state: of the optimizer.
        program: the step.
        costs: its costs.
        allowance: what the step may occupy while ``state`` streams as now.
        tier: where it is between updates.
        planned_seconds: of the step by its plan; infinite if none fits.
    """
    best_bytes, best_seconds = None, planned_seconds
    total_bytes, now_bytes = state.nbytes, state.streamed_bytes
    window_bytes = 0 if state.runs_in_chunks else state.window_bytes
    for nbytes in (int(share * total_bytes) for share in _SHARES):
        more_bytes = nbytes - now_bytes
        freed_bytes = min(more_bytes, allowance.trained.optimizer_bytes + allowance.trained.pending_optimizer_bytes)
        freed_bytes -= window_bytes
        if more_bytes <= 0 or freed_bytes <= 0:
            continue
        found = plans.try_within(program, costs, allowance.of_step_bytes(allowance.step_bytes + freed_bytes))
        if found is None or nbytes + found.plan.tier_bytes.get(tier, 0) > found.machine.tier(tier).held_bytes:
            continue
        seconds = found.plan.predicted_seconds + _update_seconds(found.machine.tier(tier).link, more_bytes)
        if seconds < best_seconds * (1 - _WORTH_STREAMING):
            best_bytes, best_seconds = nbytes, seconds
    return best_bytes


def _update_seconds(link: Link, nbytes: int) -> float:
    """Return the seconds of copying ``nbytes`` in and out, while both directions are busy."""
    return max(link.out_rate.seconds(nbytes), link.in_rate.seconds(nbytes)) * 2 / link.both_rate
