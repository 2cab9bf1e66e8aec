"""The inputs of a search for a plan, as one immutable request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lmswap.analyze.memory import StepMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.planner import KEEP_WHAT_FITS
from lmswap.session.allowance import Allowance
from lmswap.session.retention import Retention


@dataclass(frozen=True)
class PlanRequest:
    """A step to plan, and the limits of its plan."""

    program: Program
    costs: OpCosts
    machine: Machine
    allowance: Allowance
    retention: Retention  # what the caller is assumed to hold outside of an arena
    policy: str
    ahead_bytes: int = 0  # to leave free in addition, for growth to come, if a plan can
    priced: Plan | None = None  # a plan by the same costs and machine: its certificate holds for the same budget

    @property
    def costs_with_streams(self) -> OpCosts:
        """See `PlannedMemory.with_streams`."""
        return self.allowance.room.with_streams(self.program, self.costs)

    @property
    def keeps_all(self) -> bool:
        """Whether the whole step fits as it is, so that no plan moves anything, and none depends on the machine."""
        max_bytes = replace(self.allowance, ahead_bytes=self.ahead_bytes).step_bytes
        peak_bytes = StepMemory(self.program, self.costs_with_streams).curve.max(initial=0)
        return self.policy in KEEP_WHAT_FITS and bool(peak_bytes <= max_bytes)

    def alternatives(self, choices: Sequence[Retention]) -> Iterator[PlanRequest]:
        """Yield what to search for while no plan is found: nothing left free ahead, and each of ``choices``."""
        ahead = replace(self.allowance, ahead_bytes=self.ahead_bytes)
        for allowance in (ahead, self.allowance) if self.ahead_bytes else (self.allowance,):
            for choice in choices:
                yield replace(self, allowance=allowance, ahead_bytes=0, retention=choice)
