"""The order in which a model's graphs ran in its last steps, and whether it needs a plan of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from lmswap.runtime.recorder import Recorder
from lmswap.runtime.step_record import EndedStep, SegmentKey
from lmswap.session.diagnostics import Notes
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import PlannedStep


@dataclass(frozen=True)
class RunOrder:
    """The graphs of a step, in the order in which they ran."""

    forwards: tuple[int, ...] = ()
    backwards: tuple[int, ...] = ()

    @staticmethod
    def of(step: EndedStep | None) -> RunOrder:
        """Return the graphs of ``step``, or none."""
        return _ran(step.sequence if step is not None else ())

    @cached_property
    def repeated(self) -> tuple[int, ...]:
        """Graphs that ran more than once and were trained."""
        return tuple(index for index, count in Counter(self.forwards).items() if count > 1 and index in self.backwards)

    @cached_property
    def is_chain(self) -> bool:
        """Whether several graphs ran, and each of them as often backward as forward."""
        return len(self.forwards) > 1 and sorted(self.backwards) == sorted(self.forwards)

    def is_as_planned(self, step: PlannedStep) -> bool:
        """Whether each graph ran once, and backward in the order of ``step``."""
        return step.backwards == self.backwards and len(set(self.forwards)) == len(self.forwards)


@lru_cache  # successive steps are alike
def _ran(sequence: tuple[SegmentKey, ...]) -> RunOrder:
    by_phase = {phase: tuple(index for index, ran in sequence if ran == phase) for phase in ("forward", "backward")}
    return RunOrder(by_phase["forward"], by_phase["backward"])


class CompletedStep(NamedTuple):
    """A step that ended and followed the plan of ``graphs``; ``is_as_planned``: also in its order."""

    ended: EndedStep
    graphs: tuple[int, ...]
    is_as_planned: bool
    ran: PlannedStep  # for the sizes of its run


class StepOrder:
    """Compares the order in which a model's graphs run with the planned one."""

    def __init__(self, recorder: Recorder, plans: StepPlans, notes: Notes) -> None:
        """``notes`` takes sentences for reports."""
        self._recorder, self._plans, self._notes = recorder, plans, notes
        self._num_noted = 0  # steps of the recorder's that `note_ended` has seen
        # By the first graph of a step, as steps of other kinds, such as validation, may run in between: what ran in the
        # last such step, and whether the one before was the same.
        self._begun_with: dict[int, tuple[RunOrder, bool]] = {}
        self._unplannable: set[RunOrder] = set()
        self._usual: tuple[SegmentKey, ...] | None = None  # what the last two steps ran, if that was the same

    def recurs(self, ended: EndedStep) -> bool:
        """Return whether `note_ended` would record for ``ended`` what it has recorded for the step before."""
        return ended.sequence == self._usual

    def note_ended(self) -> CompletedStep | None:
        """Record what the last step ran; return, once, the plan that it followed as a whole, if any."""
        ended = self._recorder.ended
        if ended is None or ended.number == self._num_noted:
            return None
        self._num_noted = ended.number
        ran, self._usual = RunOrder.of(ended), None
        if ran.forwards:
            before, _ = self._begun_with.get(ran.forwards[0], (None, False))
            self._begun_with[ran.forwards[0]] = ran, ran == before
            self._usual = ended.sequence if ran == before else None
        if ran.repeated and not ran.is_chain:
            self._note_repeated(ran)
        step = self._plans.get(ended.follows)
        # The graphs that it trained; if none, those that it ran.
        graphs = tuple(dict.fromkeys(ran.forwards or [index for index, _ in ended.sequence]))
        if step is None or step.graphs != graphs:
            return None
        return CompletedStep(ended, graphs, ran.is_as_planned(step), step)

    def chain_to_plan(self, first: int) -> RunOrder | None:
        """Return the order of the last step that began with graph ``first``, if it is to be planned.

        A step that runs a graph several times may run it another number of times next, and one with another order of
        backwards may change it again: both are planned when they recur.
        """
        ran, has_settled = self._begun_with.get(first, (RunOrder(), False))
        planned = self._plans.get(ran.forwards)
        if not ran.is_chain or ran in self._unplannable or (planned and planned.backwards == ran.backwards):
            return None
        if has_settled or not (ran.repeated or planned):
            return ran
        if planned:
            self._notes.append_once(
                "graphs ran backward in another order than planned for: the step may exceed the budget"
            )
        return None

    def cannot_plan(self, ran: RunOrder) -> None:
        """Mark an order for which no plan was found, so that it is not searched before each step."""
        self._unplannable.add(ran)

    def _note_repeated(self, ran: RunOrder) -> None:
        index = ran.repeated[0]
        self._notes.append_once(
            f"graph {index} ran {ran.forwards.count(index)} times in a step, and each run is planned as if it were the "
            "only one: the step may exceed the budget"
        )
