"""What ran? The order of a model's graphs in its last steps, and whether it is worth a plan of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lmswap.execute.record import Recorder
from lmswap.execute.step import EndedStep
from lmswap.session.notes import Notes
from lmswap.session.steps import PlannedStep, StepPlans


@dataclass(frozen=True)
class Ran:
    """The graphs of a step, in the order in which they ran."""

    forwards: tuple[int, ...] = ()
    backwards: tuple[int, ...] = ()

    @staticmethod
    def of(step: EndedStep | None) -> Ran:
        """The graphs of ``step``, or none."""
        sequence = step.sequence if step is not None else ()
        by_phase = {phase: tuple(index for index, ran in sequence if ran == phase) for phase in ("forward", "backward")}
        return Ran(by_phase["forward"], by_phase["backward"])

    @property
    def repeated(self) -> tuple[int, ...]:
        """Graphs that ran more than once and were trained."""
        return tuple(index for index, count in Counter(self.forwards).items() if count > 1 and index in self.backwards)

    @property
    def is_chain(self) -> bool:
        """Whether several graphs ran, and each of them came backward as often as forward."""
        return len(self.forwards) > 1 and sorted(self.backwards) == sorted(self.forwards)

    def is_as_planned(self, step: PlannedStep) -> bool:
        """Whether each graph ran once, and backward in the order of ``step``."""
        return step.backwards == self.backwards and len(set(self.forwards)) == len(self.forwards)


class StepOrder:
    """Compares the order in which a model's graphs run with the one that they are planned in."""

    def __init__(self, recorder: Recorder, plans: StepPlans, notes: Notes) -> None:
        """``notes`` is where sentences for people go."""
        self._recorder, self._plans, self._notes = recorder, plans, notes
        self._before = Ran()  # in the step before the last

    def last(self) -> Ran:
        """What ran in the last step."""
        return Ran.of(self._recorder.ended)

    def followed(self) -> PlannedStep | None:
        """The plan of the last step, if it followed it with the graphs that it was made for."""
        ended = self._recorder.ended
        step = self._plans.get(ended.follows) if ended is not None else None
        if ended is None or step is None:
            return None
        # The graphs that it trained; where it trained none, those that it ran.
        ran = tuple(dict.fromkeys(self.last().forwards or [index for index, _ in ended.sequence]))
        return step if step.graphs == ran else None

    def chain_to_plan(self, first: int) -> Ran | None:
        """The order of the last step if a step that begins with graph ``first`` is to be planned by it.

        A step that runs a graph several times may run it another number of times next, and one whose losses ask for
        another order than before may ask for yet another: both are planned when they recur.
        """
        ran = self.last()
        has_settled, self._before = ran == self._before, ran
        if ran.repeated and not ran.is_chain:
            self._note_repeated(ran)
        planned = self._plans.get(ran.forwards)
        if not ran.is_chain or (planned and planned.backwards == ran.backwards):
            return None
        if ran.forwards[0] == first and (has_settled or not (ran.repeated or planned)):
            return ran
        if planned:
            self._notes.append_once(
                "graphs ran backward in another order than planned for: the step may exceed the budget"
            )
        return None

    def _note_repeated(self, ran: Ran) -> None:
        index = ran.repeated[0]
        self._notes.append_once(
            f"graph {index} ran {ran.forwards.count(index)} times in a step, and each run is planned as if it were the "
            "only one: the step may exceed the budget"
        )
