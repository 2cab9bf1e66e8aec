"""Which step shows what the host takes to queue one? The first with its plan in which nothing was done once for all."""

from __future__ import annotations

from lmswap.execute.engine import SwapEngine
from lmswap.execute.step import StepRecord
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.plan.calibrate import host_as_measured
from lmswap.session.planned import PlannedStep


class HostTime:
    """Whether it has been read for a plan, and whether the step that has just ended shows it.

    Code that runs for the first time takes the host longer, and so does the arena that finds out where to put what.
    """

    def __init__(self, engine: SwapEngine) -> None:
        self._engine = engine
        self._num_found_out, self._has_found_out = 0, False  # by the arena until the last step; whether it did in it
        self._read: dict[tuple[int, ...], Plan] = {}  # by step: the plan for which it was

    def step_ended(self) -> None:
        """Looks at whether the arena had to find places in it."""
        arena = self._engine.arena
        num_computed = arena.num_computed if arena is not None else 0
        self._has_found_out, self._num_found_out = num_computed != self._num_found_out, num_computed

    def is_shown(self, step: PlannedStep) -> bool:
        """Whether ``step``, which has just ended, shows what is not known yet."""
        known = self._read.get(step.graphs)
        is_known = known is not None and known.acts_as(step.plan)
        return step.machine.host is not None and not self._has_found_out and not is_known

    def read(self, step: PlannedStep, record: StepRecord) -> Machine:
        """The machine of ``step`` with what ``record`` shows, once for each plan."""
        self._read[step.graphs] = step.plan
        return host_as_measured(step.joined.program, step.plan, step.machine, record.host_seconds())
