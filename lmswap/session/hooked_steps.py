"""The plans of steps that saved-tensor hooks serve: which recorded steps get one, and which plan a call follows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lmswap.capture.recompiles import MAX_GRAPHS
from lmswap.errors import LmswapError, OptionError
from lmswap.options import NEEDS_GRAPHS
from lmswap.saved_tensors.plan_actions import PlannedEvents
from lmswap.saved_tensors.step import HookedStep
from lmswap.session.compiled_graph import SavedSequence
from lmswap.session.session import Session

# Orders of saved tensors that ran once: how many are remembered until they recur, and how many are recorded before any
# has recurred; and how many steps are recorded once an order recurs that was not recorded.
_MAX_ORDERS, _FEW_ORDERS, _RECORDED_STEPS = 256, 4, 16


class HookedSteps:
    """The steps of one model by their kind, which a call knows before the step has saved anything."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sequences: list[SavedSequence] = []
        self._last_of_kind: dict[Hashable, SavedSequence] = {}
        self._unplanned: dict[int, None] = {}  # hashes of orders that ran once, the latest last
        self._num_to_record = 0  # steps, since an order recurred that was not recorded
        self._refused: dict[Hashable, LmswapError] = {}  # by kind of step: why there is no plan
        self._finished: list[HookedStep] = []  # recorded, not yet planned for

    def known(self) -> Sequence[PlannedEvents]:
        """Return the steps with plans, the latest first."""
        return [sequence.events for sequence in reversed(self._sequences)]

    def spare_bytes(self) -> int:
        """Return the saved bytes that a step without a plan may keep resident."""
        if self._session.options.policy == "swap_all":
            return 0
        return min((sequence.spare_bytes for sequence in self._sequences), default=0)

    def records(self) -> bool:
        """Whether to record the next step if it has no plan; recording takes as long as a short step itself.

        A model that saves other tensors in each step, such as a mixture of experts, records the first few, and more
        once an order has recurred.
        """
        if len(self._unplanned) < _FEW_ORDERS:
            return True
        self._num_to_record = max(0, self._num_to_record - 1)
        return self._num_to_record > 0

    def ended(self, step: HookedStep) -> None:
        """Note that a backward through ``step`` has ended."""
        if step.recording is not None and step not in self._finished:
            self._finished.append(step)
        elif step.planned is not None:
            graph = step.planned.graph
            self._last_of_kind[step.kind] = next(known for known in self._sequences if known.index == graph)
        elif step.num_storages and not step.has_inner_backward and self._recurs(hash(step.event_sequence)):
            self._num_to_record = _RECORDED_STEPS

    def plan_for(self, kind: Hashable) -> SavedSequence | None:
        """Plan the recorded steps without a plan; return the one that the next step of ``kind`` follows, if any.

        Raises:
            OptionError: the policy needs graphs.
            PlanInfeasible: no plan of a step of this kind fits the budget.
            PlanMismatch: the plan file does not have the step, or its plan does not fit.
            TierError: no plan fits the tier, or the tier has no room.
        """
        while self._finished:
            self._plan(self._finished.pop(0))
        policy = self._session.options.policy
        if policy in NEEDS_GRAPHS:
            raise OptionError(
                f"policy '{policy}' recomputes tensors, which needs graphs, and {self._session.name} is served by "
                "saved-tensor hooks; use policy='auto' or 'swap'"
            )
        if kind in self._refused:
            raise self._refused[kind].with_traceback(None)
        return self._last_of_kind.get(kind)

    def _plan(self, step: HookedStep) -> None:
        if step.recording is None:
            return
        recorded, step.recording = step.recording.recorded(), None
        same = (other for other in self._sequences if other.events.matches(recorded))
        sequence, order = next(same, None), hash((recorded.saves, recorded.needs))
        if sequence is None and len(self._sequences) < MAX_GRAPHS and self._recurs(order):
            try:
                sequence = self._session.plan_recorded(recorded)
            except LmswapError as error:
                self._refused[step.kind] = error
                return
            self._sequences.append(sequence)
            self._note_planned(sequence)
        if sequence is not None:
            self._last_of_kind[step.kind] = sequence

    def _recurs(self, order: int) -> bool:
        """Whether a step of this order ran before without a plan; the very first is expected to recur."""
        if not self._sequences:
            return True
        if order in self._unplanned:
            del self._unplanned[order]
            return True
        self._unplanned[order] = None
        if len(self._unplanned) > _MAX_ORDERS:
            del self._unplanned[next(iter(self._unplanned))]
        return False

    def _note_planned(self, sequence: SavedSequence) -> None:
        if len(self._sequences) > 1:
            events = sequence.events
            self._session.notes.append(
                f"after step {self._session.recorder.num_steps}: it saved {len(events.saves)} and needed "
                f"{len(events.needs)} tensors in an order that has run twice without a plan; now it has plan "
                f"{len(self._sequences)}"
            )
        if len(self._sequences) == MAX_GRAPHS:
            self._session.note_once(
                f"no more than {MAX_GRAPHS} different steps are planned for; others swap everything"
            )
