"""How well do swapped tensors compress, and do they take more memory than they may? Seen after steps, planned by."""

from __future__ import annotations

from lmswap.errors import BudgetExceeded
from lmswap.execute.engine import SwapEngine
from lmswap.execute.tiers import MOST_RATIO
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.machine import Machine
from lmswap.session.notes import warn
from lmswap.session.planned import PlannedStep

# Compressed memory is planned to be full to this share: what a U-Net swaps took 0.87 to 0.89 of its bytes, by plan.
_FULL_SHARE = 0.9


class Compression:
    """What the compressed tier of one model has taken of the host's memory; of any other tier there is nothing to say.

    Until a step has shown it, tensors count as they are.
    """

    def __init__(self, tier: str, engine: SwapEngine) -> None:
        """``tier`` is the one that the model swaps to, on ``engine``."""
        self._tier, self._engine = tier, engine
        self._told_bytes = 0  # more than it may take, for which no plan was found that takes less

    def excess(self, step: PlannedStep) -> str:
        """Warns if the last step has taken more than it may, and says so in words; empty where it has not."""
        if self._tier != "compressed":
            return ""
        limit_bytes, taken_bytes = step.machine.tier(self._tier).capacity_bytes, self._taken_bytes()
        if taken_bytes <= max(limit_bytes, self._told_bytes):
            return ""
        taken, limit = format_bytes(taken_bytes), format_bytes(limit_bytes)
        warn(
            f"compressed tensors took {taken} of host memory, more than its limit of {limit}: they compress less than "
            "before. Where the limit is hard, give a host_budget that is lower by that much, or a larger budget",
            BudgetExceeded,
        )
        self._told_bytes = taken_bytes
        return f"compressed tensors took {taken}, more than {limit}"

    def begin_anew(self, step: PlannedStep) -> None:
        """Gives back what the steps before took, for ``step``, whose plan is another now."""
        self._told_bytes = 0
        self._engine.native.reserve(self._tier, step.plan.tier_bytes.get(self._tier, 0), anew=True)

    def as_seen(self, step: PlannedStep) -> Machine:
        """The machine of ``step`` with the ratio that its last run has shown."""
        return step.machine.with_ratio(self._tier, self._ratio_seen(step))

    def as_needed(self, step: PlannedStep) -> Machine:
        """That, or the ratio that the plan of ``step`` needs, which stays."""
        if self._tier != "compressed":
            return step.machine
        needed = step.plan.tier_bytes.get(self._tier, 0) / step.machine.tier(self._tier).capacity_bytes
        return step.machine.with_ratio(self._tier, max(self._ratio_seen(step), needed))

    def _taken_bytes(self) -> int:
        return self._engine.native.tier_stats(self._tier).resident_bytes

    def _ratio_seen(self, step: PlannedStep) -> float:
        """How many times what the tier takes it can be planned to hold, by what the last step left in it."""
        planned_bytes = step.plan.tier_bytes.get(self._tier, 0)
        return min(max(1.0, _FULL_SHARE * planned_bytes / max(self._taken_bytes(), 1)), MOST_RATIO)
