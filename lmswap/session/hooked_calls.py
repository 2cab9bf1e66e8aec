"""The calls of one model that saved-tensor hooks serve: which recorded steps get a plan, and which plan a call follows.

Steps are known by their kind, which a call knows before the step has saved anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lmswap.capture.recompiles import MAX_GRAPHS
from lmswap.capture.size_buckets import bucket_edge
from lmswap.errors import LmswapError, OptionError
from lmswap.ir.bytesize import format_bytes
from lmswap.options import NEEDS_GRAPHS
from lmswap.runtime.step_record import SegmentKey
from lmswap.saved_tensors.hooks import Hooks
from lmswap.saved_tensors.plan_actions import PlannedEvents
from lmswap.saved_tensors.read_ahead import ReadAhead
from lmswap.saved_tensors.step import HookedStep, StepKind, storages_of
from lmswap.session.compiled_graph import SavedSequence
from lmswap.session.session import UNPLANNED, Session
from lmswap.torch_compat.modules import all_own_tensors
from lmswap.torch_compat.pytree import tensors
from lmswap.verify.saved_tensors import SavedCheck

# Orders of saved tensors that ran once: how many are remembered until they recur, and how many are recorded before any
# has recurred; and how many steps are recorded once an order recurs that was not recorded.
_MAX_ORDERS, _FEW_ORDERS, _RECORDED_STEPS = 256, 4, 16


class HookedCalls:
    """Serves a model's calls by hooks; the `lmswap.saved_tensors.step.HookContext` of their steps."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model, self._session = model, session
        self.engine_number, self.memory = session.engine.number, session.memory
        self.device, self.tier = session.device, session.options.tier
        self.min_swap_bytes = session.options.min_swap_bytes
        self.check = SavedCheck(session.verified, session.recorder) if session.verified else None
        self.module_names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
        self.hooks = Hooks()
        self._ahead = ReadAhead(session.engine.host_copies, session.engine.streams)
        self._saving: list[weakref.ref[HookedStep]] = []  # whose backward may still need them
        self._backward: tuple[SegmentKey, int, HookedStep] | None = None  # the recorder's segment under way
        self._sequences: dict[SavedSequence, StepKind | None] = {}  # with the kind of step that was planned
        self._last_of_kind: dict[StepKind | None, SavedSequence] = {}
        self._unplanned: dict[int, None] = {}  # hashes of orders that ran once, the latest last
        self._num_to_record = 0  # steps, since an order recurred that was not recorded
        self._refused: dict[StepKind | None, LmswapError] = {}  # by kind of step: why there is no plan
        self._finished: list[HookedStep] = []  # recorded, not yet planned for
        self._in_use_bytes = 0  # outside of the step that began last

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``call`` returns, run in eager mode under hooks, by the plan of the last step of this kind.

        Raises:
            OptionError: the policy needs graphs.
            PlanInfeasible: no plan of a step of this kind fits the budget.
            PlanMismatch: the plan file does not have the step, or its plan does not fit.
            TierError: no plan fits the tier, or the tier has no room.
        """
        self._end_segment()  # of a backward that raised
        kind = self.kind(args, kwargs)
        sequence = self._plan_for(kind)
        saving = (reference() for reference in self._saving)
        others = [step for step in saving if step is not None and step.holds_storages]
        self._session.prepare(sequence)
        self._session.release_graphs()
        self._in_use_bytes = self._session.budget.in_use_bytes(0)
        for other in others:
            other.drop_plan()
        planned = sequence.events if sequence and not others else None
        records = (sequence is None or not others) and self._records(kind)
        step = self.begin_step(planned, kind, args, kwargs, records=records)
        self._saving = [weakref.ref(saving) for saving in (*others, step)]
        with self._session.recorder.segment((_known_as(step), "forward"), lambda: _follows(step)):
            with self.hooks.on(step.pack, step.unpack), self.reading("forward"):
                result = call(*args, **kwargs)
            step.end_forward()
        if not step.num_storages:
            step.recording, step.awaits_any_unpack = None, True
            self._session.note_once(
                f"a step saved no tensor of at least {format_bytes(self.min_swap_bytes)} (min_swap_bytes): nothing of "
                "it can be swapped"
            )
        self._session.warn_budget_exceeded()
        if others and sequence:
            self._session.note_once(
                "a forward began before the backward of an earlier one had ended: both went on without a plan, and "
                "kept only what the budget surely has room for"
            )
        elif step.has_inner_backward:
            self._session.note_once(
                "steps that run a backward inside of the forward have no plan: everything is swapped"
            )
        return result

    def begin_step(
        self, planned: PlannedEvents | None, kind: StepKind | None, args: Any, kwargs: Any, *, records: bool
    ) -> HookedStep:
        """Return the step of a call with these arguments; see `HookedStep`."""

        def resident() -> frozenset[int]:
            return storages_of([*all_own_tensors(self._model), *tensors((args, kwargs))])

        return HookedStep(self, planned, resident, kind=kind, records=records)

    def kind(self, args: Any, kwargs: Any) -> StepKind:
        """Return the kind of the step of a call with these arguments."""
        inputs = tensors((args, kwargs))
        shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs)
        return StepKind(shapes, self._model.training, torch.is_autocast_enabled(self.device.type))

    def reading(self, phase: str) -> AbstractContextManager[None]:
        """Return the context in which operators read copies of non-resident weights that are fetched ahead.

        Those that are trained only without gradients: hooks of a backward may update them.
        """
        trains, session = phase == "forward", self._session
        weights = session.weights.readable_ahead(trained=not trains)
        max_bytes = session.budget.read_ahead_bytes(weights, is_planned=trains)
        return self._ahead.operators(phase, weights, max_bytes)

    def known_steps(self) -> Sequence[PlannedEvents]:
        """Return the steps with plans, the latest first; see `HookContext`, also for the next six."""
        return [sequence.events for sequence in reversed(self._sequences)]

    def spare_bytes(self, kind: StepKind | None) -> int:
        """Return the saved bytes that a step of ``kind`` without a plan may keep resident.

        It is what the planned steps of the nearest size would leave; of a larger one memory may grow as the square.
        """
        if kind is None or self._session.options.policy == "swap_all":
            return 0
        planned = self._sequences.items()
        growths = {each: kind.growth_from(known) ** 2 for each, known in planned if known is not None}
        least = min(growths.values(), default=1.0)
        nearest = (each for each, growth in growths.items() if growth == least)
        return min((each.spare_bytes(least, self._in_use_bytes) for each in nearest), default=0)

    @property
    def reads_ahead(self) -> bool:  # noqa: D102
        return self._ahead.is_reading

    def read(self, tensor: torch.Tensor) -> torch.Tensor:  # noqa: D102
        copy = self._ahead.copy_of(tensor)
        return tensor if copy is None else copy

    def backward_begins(self, step: HookedStep) -> None:  # noqa: D102
        self._session.engine.check_open()
        self._session.budget.earlier_outputs.begin_backward()
        self._end_segment()
        self._ahead.begin("backward")
        key = (_known_as(step), "backward")
        self._backward = (key, self._session.recorder.begin_segment(key), step)

    def begin_op(self) -> None:  # noqa: D102
        self._session.recorder.begin_op()

    def backward_ends(self, step: HookedStep) -> None:  # noqa: D102
        self._ahead.end()
        self._end_segment()
        self._session.engine.check_async_errors()
        if step.recording is not None and step not in self._finished:
            self._finished.append(step)
        elif step.planned is not None:
            graph = step.planned.graph
            self._last_of_kind[step.kind] = next(known for known in self._sequences if known.index == graph)
        elif step.num_storages and not step.has_inner_backward and self._recurs(hash(step.event_sequence)):
            self._num_to_record = _RECORDED_STEPS
        self._session.warn_budget_exceeded()

    def _end_segment(self) -> None:
        if self._backward is not None:
            key, start, step = self._backward
            self._backward = None
            self._session.recorder.end_segment(key, start, _follows(step))

    def _records(self, kind: StepKind) -> bool:
        """Whether to record the next step, of ``kind``, if it has no plan; recording takes as long as a short step.

        A model that saves other tensors in each step, such as a mixture of experts, records the first few, the first
        that are larger, and more once an order has recurred.
        """
        if len(self._unplanned) < _FEW_ORDERS or self._is_larger(kind):
            return True
        self._num_to_record = max(0, self._num_to_record - 1)
        return self._num_to_record > 0

    def _plan_for(self, kind: StepKind) -> SavedSequence | None:
        """Plan the recorded steps without a plan; return the one that the next step of ``kind`` follows, if any."""
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
        is_new = sequence is None and len(self._sequences) < MAX_GRAPHS
        if is_new and (self._is_larger(step.kind) or self._recurs(order)):
            try:
                sequence = self._session.plan_recorded(recorded)
            except LmswapError as error:
                self._refused[step.kind] = error
                return
            self._sequences[sequence] = step.kind
            self._note_planned(sequence)
        if sequence is not None:
            self._last_of_kind[step.kind] = sequence

    def _is_larger(self, kind: StepKind | None) -> bool:
        """Whether steps of ``kind`` take more than the planned ones, whose plans say too little of them."""
        known = (each for each in self._sequences.values() if each is not None)
        return kind is not None and all(
            any(bucket_edge(own) > bucket_edge(its) for own, its in kind.paired_values(each)) for each in known
        )

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
                f"another kind of step, in which {len(events.saves)} tensors are saved and {len(events.needs)} needed, "
                f"has a plan of its own from step {self._session.recorder.num_steps + 1} on, the model's plan "
                f"{len(self._sequences)}"
            )
        if len(self._sequences) == MAX_GRAPHS:
            self._session.note_once(
                f"no more than {MAX_GRAPHS} different steps are planned for; others swap everything"
            )


def _known_as(step: HookedStep) -> int:
    """Return the graph that records name for ``step``, by the plan that it began with."""
    return step.graph if step.graph is not None else UNPLANNED


def _follows(step: HookedStep) -> tuple[int, ...]:
    """Return the plan that ``step`` follows now, as records name it."""
    return (step.planned.graph,) if step.planned is not None else ()
