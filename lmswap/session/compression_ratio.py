"""Measures how well swapped tensors compress, and whether they exceed the memory of the compressed tier."""

from __future__ import annotations

from lmswap.errors import BudgetExceeded
from lmswap.execute.engine import SwapEngine
from lmswap.execute.tiers import MOST_RATIO
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.machine import Machine
from lmswap.session.diagnostics import warn
from lmswap.session.planned_step import PlannedStep

# Plans fill compressed memory to this share: tensors that a U-Net swaps took 0.87 to 0.89 of the planned bytes.
_FULL_SHARE = 0.9


class Compression:
    """The host memory that the compressed tier of one model takes; without effect for any other tier.

    Until a step has shown the ratio, tensors count uncompressed.
    """

    def __init__(self, tier: str, engine: SwapEngine) -> None:
        """``tier`` is the tier that the model swaps to, on ``engine``."""
        self._tier, self._engine = tier, engine
        self._accepted_bytes = 0  # an excess for which no plan was found that takes less

    def excess(self, step: PlannedStep) -> str:
        """Warn if the last step exceeded the limit, and return a sentence on it; empty if it did not."""
        if self._tier != "compressed":
            return ""
        limit_bytes, taken_bytes = step.machine.tier(self._tier).capacity_bytes, self._taken_bytes()
        if taken_bytes <= max(limit_bytes, self._accepted_bytes):
            return ""
        taken, limit = format_bytes(taken_bytes), format_bytes(limit_bytes)
        warn(
            f"compressed tensors took {taken} of host memory, more than its limit of {limit}: they compress less than "
            "before. Where the limit is hard, give a host_budget that is lower by that much, or a larger budget",
            BudgetExceeded,
        )
        self._accepted_bytes = taken_bytes
        return f"compressed tensors took {taken}, more than {limit}"

    def reset(self, step: PlannedStep) -> None:
        """Release the memory of earlier steps, for ``step``, which has another plan now."""
        self._accepted_bytes = 0
        nbytes, replace = step.plan.tier_bytes.get(self._tier, 0), True
        self._engine.native.reserve(self._tier, nbytes, replace)

    def with_measured_ratio(self, step: PlannedStep) -> Machine:
        """Return the machine of ``step`` with the ratio that its last run has shown."""
        return step.machine.with_ratio(self._tier, self._ratio_seen(step))

    def with_needed_ratio(self, step: PlannedStep) -> Machine:
        """Return the machine with that ratio, or the one that the plan of ``step`` needs if it is larger."""
        if self._tier != "compressed":
            return step.machine
        needed = step.plan.tier_bytes.get(self._tier, 0) / step.machine.tier(self._tier).capacity_bytes
        return step.machine.with_ratio(self._tier, max(self._ratio_seen(step), needed))

    def _taken_bytes(self) -> int:
        return self._engine.native.tier_stats(self._tier).resident_bytes

    def _ratio_seen(self, step: PlannedStep) -> float:
        """Return the ratio of swapped to occupied bytes to plan with, by what the last step left in the tier."""
        planned_bytes = step.plan.tier_bytes.get(self._tier, 0)
        return min(max(1.0, _FULL_SHARE * planned_bytes / max(self._taken_bytes(), 1)), MOST_RATIO)
