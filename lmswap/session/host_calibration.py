"""Selects the step from which the host's time to queue a step is calibrated: the first without one-time work."""

from __future__ import annotations

from lmswap.execute.engine import SwapEngine
from lmswap.execute.step_record import StepRecord
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.plan.calibrate import host_as_measured
from lmswap.session.planned_step import PlannedStep


class HostTime:
    """The plans whose host time is known, and whether the step that just ended shows it.

    The host takes longer for code that runs for the first time, and while the arena computes offsets.
    """

    def __init__(self, engine: SwapEngine) -> None:
        self._engine = engine
        self._num_computed, self._has_computed = 0, False  # offsets of the arena so far; whether any in the last step
        self._read: dict[tuple[int, ...], Plan] = {}  # by step: the plan it was read for

    def step_ended(self) -> None:
        """Note whether the arena computed offsets in the step."""
        arena = self._engine.arena
        num_computed = arena.num_computed if arena is not None else 0
        self._has_computed, self._num_computed = num_computed != self._num_computed, num_computed

    def is_shown(self, step: PlannedStep) -> bool:
        """Whether ``step``, which just ended, shows a host time that is not known yet."""
        known = self._read.get(step.graphs)
        is_known = known is not None and known.acts_as(step.plan)
        return step.machine.host is not None and not self._has_computed and not is_known

    def read(self, step: PlannedStep, record: StepRecord) -> Machine:
        """Return the machine of ``step`` with the host time of ``record``, once for each plan."""
        self._read[step.graphs] = step.plan
        return host_as_measured(step.joined.program, step.plan, step.machine, record.host_seconds())
