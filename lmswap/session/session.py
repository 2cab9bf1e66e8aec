"""An enabled model's engine, graphs, plans and records: joins the stages.

torch passes one graph after another (graph breaks, shapes, train and eval cause several); each is lowered, timed,
planned and rewritten before it runs. Graphs that ran in one step are planned together, as one timeline, before the next
such step; `lmswap.session.replan_triggers` has the other causes of replanning.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx, nn

from lmswap.analyze.cost import roofline
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.capture.recompiles import retrace_limit_reason
from lmswap.collection_pause import collection_paused
from lmswap.errors import (
    ForkedProcess,
    NotManaged,
    OptionError,
    PlanInfeasible,
    TierError,
)
from lmswap.hardware.memory import DeviceMemory, device_memory
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.program import Program
from lmswap.options import NEEDS_GRAPHS, Options
from lmswap.progress import reported
from lmswap.runtime import _C
from lmswap.runtime.arena import Arena
from lmswap.runtime.engine import SwapEngine
from lmswap.runtime.partial_backward import ActiveBackwards, PartialResults, Results
from lmswap.runtime.step_record import EndedStep, SegmentKey
from lmswap.runtime.storage import has_plain_storage
from lmswap.runtime.streams import MULTIPLE_STREAMS
from lmswap.saved_tensors.recording import Recorded
from lmswap.session.budget import BudgetTracker
from lmswap.session.budget_monitor import BudgetMonitor
from lmswap.session.compiled_graph import (
    CapturedGraph,
    Evicted,
    Graphs,
    SavedSequence,
    assign_run_indices,
    planned_graph,
)
from lmswap.session.context import ModelContext
from lmswap.session.diagnostics import Notes, warn
from lmswap.session.engine_setup import (
    KnownMachine,
    can_swap_weights,
    complete_options,
    describe_choices,
    has_places,
    open_device,
)
from lmswap.session.graph_capture import compile_graph
from lmswap.session.plan_file import PinnedPlans, pinned_options
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import Phase, PlannedStep
from lmswap.session.planner import Planner
from lmswap.session.replan import Replanner
from lmswap.session.retention import RetentionEstimate
from lmswap.session.state_streaming import StateStreaming
from lmswap.session.step_planning import StepPlanning
from lmswap.session.step_sequence import RunOrder, StepOrder
from lmswap.session.traces import Traces
from lmswap.torch_compat.process_groups import is_distributed
from lmswap.training_state import TrainingState
from lmswap.training_state.cpu_updates import CpuUpdates
from lmswap.training_state.gradients import StreamedGradients
from lmswap.training_state.optimizer_memory import TrainableParameters
from lmswap.training_state.optimizer_state import ChunkedUpdates
from lmswap.training_state.updates import Updates
from lmswap.training_state.weights import Weights
from lmswap.verify.summary import Verified
from lmswap.verify.transfer_checksums import Audit

_log = logging.getLogger(__name__)

# In records, instead of the number of a graph, for a step without a plan.
UNPLANNED = -1


class Session:
    """An enabled model's engine, graphs, plans and records. Dynamo calls it with each graph that it captures."""

    _open: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()
    _closed: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()  # those that still hold optimizers

    def __init__(
        self, name: str, options: Options, device: torch.device, state: TrainingState, *, has_hooks: bool
    ) -> None:
        """Open the engine and its tier; ``state`` is the model's.

        ``has_hooks``: where its graphs cannot serve the model, saved-tensor hooks can.

        Raises:
            OptionError: the budget or the tier is not available on ``device``.
            TierError: the tier's memory or directory cannot be used.
            PlanMismatch: the plan file cannot be followed.
        """
        pinned = PinnedPlans.read(options.plan) if options.plan is not None else None
        options = pinned.complete(options) if pinned is not None else options
        self.name, self.device = name, device
        self.notes, self.verified = Notes(name), Verified(name) if options.verify else None
        self.plan_notes = Notes(name)  # on its plans and their replacement
        # On what graphs compute, and on the order in which they run.
        self._graph_notes, self._order_notes = Notes(name), Notes(name)
        self._num_graph_steps: int | None = None  # once hooks serve the model instead of graphs
        trained = TrainableParameters(lambda: state.parameters().values())
        self.retention = RetentionEstimate(trained.have_gradients)
        with ExitStack() as undoing:
            opened = open_device(device, options, pinned)
            machine, native = opened.machine, opened.native
            undoing.callback(native.close)
            self.options = options = complete_options(options, opened, device, state)
            self.memory: DeviceMemory = device_memory(device)
            undoing.callback(self.memory.close)
            audit = Audit(native, self.verified, self._describe) if self.verified else None
            arena = Arena(device) if has_places(device, options) else None
            self.engine = SwapEngine(
                device, native, self.memory, tier=options.tier, describe=self._describe, audit=audit, arena=arena
            )
            self.recorder = self.engine.recorder
            self.weights = Weights(
                state, self.engine.host_copies, min_bytes=options.min_swap_bytes, note=self.note_once
            )
            self.budget = BudgetTracker(
                options, device.type, self.memory, trained, self.weights, notes=self.notes, arena=arena
            )
            self.updates = trained.updates = self._open_updates(state, machine, pinned, undoing)
            if options.weights == "swap":
                undoing.callback(self.weights.restore)
                self._manage_weights()
            undoing.pop_all()
        # Where what holds it is garbage before `close`: a compiled module that was deleted, and its last backward.
        weakref.finalize(self, _free, native, self.memory).atexit = False
        self.notes.extend(describe_choices(options, device, opened, state))
        self.graphs: Graphs = []
        self.num_captured = 0  # of these, by Dynamo; others are further runs of one graph, or recorded by hooks
        context = ModelContext(
            name,
            options,
            self.engine,
            self.memory,
            self.budget,
            self.retention,
            machine,
            self.plan_notes,
            self.weights,
            pinned=pinned,
            node=opened.node,
        )
        self.planner = planner = Planner(context)
        self.losses = planner.losses
        self.streaming = StateStreaming(context, planner, self.updates, self.graphs, notes=self.notes)
        self.plans = StepPlans(context, planner)
        self._budget_monitor = BudgetMonitor(context, self.plans)
        self.traces = Traces(context, self.plans, self.graphs)
        self._order = StepOrder(self.recorder, self.plans, self._order_notes)
        self._replanner = Replanner(context, planner, self.plans)
        self.meter = OpProfiler(device, self.memory, lambda program: roofline(program, machine.now), self.note_once)
        self.planning = StepPlanning(context, self.plans, self.traces, self.streaming, self.meter, graphs=self.graphs)
        self.has_hooks, self.leaves_graphs = has_hooks, False  # whether hooks have to from its next call on
        self._process, self._outputs = os.getpid(), self.budget.earlier_outputs
        self._backwards = ActiveBackwards(name)
        self._repeated: tuple[CapturedGraph, int] | None = None  # what may repeat: see `_repeats`
        self._owner: weakref.finalize[..., Any] | None = None
        Session._open.add(self)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph, as Dynamo's backend; return the function that runs instead of it."""
        return compile_graph(self, module, inputs)

    @property
    def runs_uncaptured(self) -> bool:
        """Whether code runs whose graph cannot be planned; hooks serve what it saves."""
        return self.has_hooks and self.options.compiler == "fx"

    @property
    def may_share_plans(self) -> bool:
        """Whether plans may serve calls of other sizes than those that they were made for.

        Offsets in an arena are those of one size; and torch selects a GPU's attention kernels by size as it traces.
        """
        return self.options.compiler == "fx" and self.engine.arena is None

    @collection_paused()
    def plan_recorded(self, recorded: Recorded) -> SavedSequence:
        """Plan a step that was recorded by saved-tensor hooks.

        Raises:
            PlanInfeasible: no plan fits the budget.
            PlanMismatch: the plan file does not have the step, or its plan does not fit.
            TierError: no plan fits the tier, or the tier has no room.
        """
        sequence = SavedSequence(self, len(self.graphs), recorded)
        self.graphs.append(sequence)
        self.budget.has_trained = True
        try:
            self.planning.plan((sequence.index,))
        except BaseException:
            self.discard(sequence)
            raise
        self._compile((sequence.index,))
        return sequence

    def discard(self, graph: CapturedGraph | SavedSequence) -> None:
        """Remove a graph that failed, and its plan: the next graph gets its number."""
        self.graphs.remove(graph)
        self.losses.forget(graph.index)
        self.plans.drop(lambda graphs: graph.index in graphs)

    def mark_prepared(self) -> None:
        """Note that graphs are captured, timed or planned in the current step."""
        self._budget_monitor.mark_prepared(self.recorder.num_steps + 1)

    def make_room_to_trace(self) -> None:
        """Give back what steps left for reuse, before a trace, or a plan for other sizes, takes memory beside it."""
        self.engine.release_cached()
        self.memory.decommit(self.memory.reusable_bytes())

    def release_graphs(self) -> None:
        """Free arena and traces: a model that hooks serve runs its own code, which allocates elsewhere.

        From the first such step on they would occupy a part of the budget without use.
        """
        if self.engine.arena is not None:
            self.engine.close_arena()
            self.budget.close_arena()
        if self.traces.num_kept:
            self.traces.evict_all()
            self.memory.collect()

    def check_caller(self) -> None:
        """Raise ForkedProcess in a forked child, TransferError once disabled, OptionError in a CUDA graph."""
        if os.getpid() != self._process:
            raise ForkedProcess(self.name)
        self.engine.check_open()
        self.engine.streams.refuse_graph_capture(self.name)

    def differentiated_twice(self) -> str:
        """Return the error for differentiating gradients once more; use hooks from the next call on, if possible."""
        what = f"{self.name}'s gradients are differentiated once more (create_graph=True), as for a gradient penalty"
        why = "graphs of torch.compile cannot be"
        if not self.has_hooks or self.options.policy in NEEDS_GRAPHS:
            return f'{what}; {why}: use lmswap.enable(model, compiler="eager", policy="auto"), which has no graphs'
        self.leave_graphs(f"{what}; {why}")
        return (
            f"{what}; {why}. Nothing is lost and no parameter has changed: zero the gradients and take the step again, "
            'from the next call on the model is served by saved-tensor hooks, which can. With compiler="eager" it is '
            "from the first call on"
        )

    def reach_trace_limit(self) -> None:
        """Use hooks from the next call on, as the model was traced too often; now they serve what is untraced."""
        self.leave_graphs(retrace_limit_reason())

    def leave_graphs(self, why: str) -> None:
        """Use hooks from the next call on, and note ``why``; no effect where they are to be used already."""
        if not self.leaves_graphs:
            self.leaves_graphs = True
            self.note_once(f"path: saved-tensor hooks for the whole model instead of torch.compile: {why}")

    def prepare(self, graph: CapturedGraph | SavedSequence | None) -> None:
        """Prepare to run ``graph`` forward, None if it has no plan: end the last step, if that is complete.

        Before the first graph of a step, plans are replaced if the last step like it has shown a cause.
        """
        self._backwards.end()
        self.engine.reap_finished_transfers()
        if self.recorder.is_complete:
            self.make_room()  # the caller may have loaded a state since, and freed what the file held
        self.recorder.end_if_complete()
        if self._repeats(graph):
            return
        self.warn_budget_exceeded()
        if self.engine.streams.are_multiple:
            self.note_once(MULTIPLE_STREAMS)
        if not self.recorder.current_sequence:
            self._begin_step(graph)

    def _begin_step(self, graph: CapturedGraph | SavedSequence | None) -> None:
        """Measure what is held between two steps, observe the last one, and replan the one that ``graph`` begins."""
        self.planning.refusal = None
        self.recorder.expect_others()
        self.retention.observe()
        self.traces.look()
        if graph is not None:
            self.engine.begin_step()
        self.budget.begin_step(self.recorder.num_steps + 1)
        is_usual = self._observe_ended(graph)
        if graph is None:
            return
        if (ended := self.recorder.ended) is not None and ended.trains:
            self.budget.has_run()
        self._replan(graph, is_usual=is_usual)
        if isinstance(graph, CapturedGraph) and (step := self.plans.get(graph.follows)) is not None:
            self.plans.place_weights(step)

    def _observe_ended(self, graph: CapturedGraph | SavedSequence | None) -> bool:
        """Observe the step that ended last, unless it has shown nothing; whether that is so."""
        ended = self.recorder.ended
        if (
            ended is not None
            and (graph is None or graph.index == ended.sequence[0][0])  # else more may be in use when one like it runs
            and self._order.recurs(ended)
            and self._replanner.shows_nothing(ended)
        ):
            return True
        if followed := self._order.note_ended():
            if followed.ran.history.phase is not Phase.FINAL:  # else it shows no seconds
                followed = followed._replace(ran=self._as_it_ran(followed.ran))
            self._replanner.observe(followed)
        return False

    def _replan(self, graph: CapturedGraph | SavedSequence, *, is_usual: bool) -> None:
        """Answer what the last step that began with ``graph`` has shown, before one like it runs."""
        ended = self.recorder.ended
        run = self._replanner.pop_run(graph.index)
        if isinstance(graph, CapturedGraph) and self._plan_in_order(self._order.chain_to_plan(graph.index)):
            return
        if run:
            if self._replanner.apply(run, lambda: self._released(run.graphs)):
                self._compile(run.graphs)
            if self.recorder.times_ops:
                self.mark_prepared()
        elif is_usual and ended is not None and ended.trains and isinstance(graph, CapturedGraph):
            self._expect_repeats(graph, ended)

    def _plan_in_order(self, ran: RunOrder | None) -> bool:
        """Plan graphs that ran in one step together, in the order in which they ran; whether they have a new plan."""
        if ran is None or any(isinstance(self.graphs[index], Evicted) for index in ran.forwards):
            return False
        indices = assign_run_indices(self.graphs, ran.forwards)
        try:
            # Runs of one graph have numbers of their own from the next step on, and so has their order.
            with self.recorder.own.paused():
                self.planning.plan(indices, None if ran.repeated else [indices.index(index) for index in ran.backwards])
        except (PlanInfeasible, TierError) as error:
            if self.plans.get(ran.forwards) is None:
                raise
            self.plan_notes.append_once(
                f"the plan stays as it was though graphs ran backward in another order: {error.summary}"
            )
            self._order.cannot_plan(ran)
            return False
        self._compile(indices)
        return True

    def _compile(self, indices: tuple[int, ...]) -> None:
        self.mark_prepared()
        self.recorder.forget_curves()
        with self.recorder.own.paused(), reported(f"{self.name}, another plan", "compiling"):
            for index in indices:
                planned_graph(self.graphs, index).follow(indices)
        if any(isinstance(self.graphs[index], CapturedGraph) for index in indices):
            self.memory.collect()
        else:
            self.memory.compact()

    def _expect_repeats(self, graph: CapturedGraph, ended: EndedStep) -> None:
        """Let steps that begin with ``graph`` repeat ``ended`` without a look at it, if its plan moves nothing."""
        limits = self._replanner.repeat_limits(ended)
        if limits is not None:
            # A plan that moves nothing keeps all weights that it counts as parts of the step.
            in_step_bytes = self.weights.kept_bytes + self.budget.earlier_output_bytes
            self._repeated = graph, limits.held_bytes + in_step_bytes
            self.recorder.expect_repeats(limits.peak_bytes)

    def _repeats(self, graph: CapturedGraph | SavedSequence | None) -> bool:
        """Whether the last step was a repetition, the one of ``graph`` may be, and no more is held outside of it.

        Such a step shows no cause to replan, warn or evict; every `STEPS_PER_LAP` steps one is looked at.
        """
        if self._repeated is None or not self.recorder.expects_repeat:
            return False
        expected, held_bytes = self._repeated
        return graph is expected and self.memory.used_tensor_bytes() <= held_bytes

    def _released(self, graphs: tuple[int, ...]) -> frozenset[int]:
        """Return the outputs and tangents that the caller of the last step of ``graphs`` did not hold; stop tracking.

        None are known for several graphs, as some outputs are the step's own.
        """
        captured = [graph for graph in map(self.graphs.__getitem__, graphs) if isinstance(graph, CapturedGraph)]
        released = [graph.handover.take_released() for graph in captured]
        return released[0] if len(released) == 1 else frozenset()

    def make_room(self) -> None:
        """Give free memory back as far as the budget needs it for pages that the caller maps: it may read host copies.

        Called as the last backward of a step ends, a call without one, and an update, and before the next step.
        """
        if self.device.type == "cpu" and (host_copies := self.engine.host_copies):
            self.budget.make_room(host_copies)

    def register_backward(self, parts: Generator[Results, None, None]) -> PartialResults:
        """Register a backward that is about to run."""
        self.retention.observe(in_backward=True)
        self._outputs.begin_backward()
        self._backwards.end()
        return self._backwards.add(parts)

    def current_step(self) -> PlannedStep | None:
        """Return the plan of the last step that trained, or of the first that will run; None if it followed none.

        If no step has trained, the plan of the last one that ran, as in `Recorder.last_training`.
        """
        ran = self.recorder.trained or self.recorder.ended
        step = self.plans.get(ran.follows) if ran is not None else self.plans.newest()
        return self._as_it_ran(step) if step is not None else None

    def _as_it_ran(self, step: PlannedStep) -> PlannedStep:
        """Return ``step`` for the sizes of its last run."""
        for graph in map(self.graphs.__getitem__, step.graphs):
            if isinstance(graph, CapturedGraph):
                step = graph.as_it_ran(step)
        return step

    def pinned(self) -> PinnedPlans:
        """Return the plans that all planned steps follow now, for a file."""
        weights = "swap" if self.weights.is_managed else self.options.weights
        options = pinned_options(replace(self.options, budget_bytes=self.budget.nbytes, weights=weights))
        num_streamed, streams_gradients = len(self.updates.streamed), self.updates.gradients.are_streamed
        return PinnedPlans(self.name, options, self.plans.active(), num_streamed, streams_gradients)

    def warn_budget_exceeded(self) -> None:
        """Warn of all that exceeded the budget: steps that ended, or whose backward has, and forwards without any."""
        if self.recorder.is_repeated:
            return
        budget_bytes, steps = self.budget.nbytes, self.recorder.take_ended()
        under_way = self.recorder.complete(above_bytes=budget_bytes) or self._forwards_alone()
        for step in (*steps, under_way):
            # Checks take memory of their own, as the notes say.
            if step is not None and step.peaks.used_bytes > budget_bytes and self.verified is None:
                num_models = sum(session.device == self.device for session in Session._open)
                is_hooked = self.is_hooked(step.sequence)
                self._budget_monitor.report(step, num_models=num_models, is_hooked=is_hooked)

    def _forwards_alone(self) -> EndedStep | None:
        """Return several calls of the model without a backward, if any; graphs that ran once each may be one call's."""
        sequence = self.recorder.pending_sequence
        if len(sequence) < 2:
            return None
        forwards = [graph for graph, phase in sequence if phase == "forward"]
        if len(forwards) < 2 or any(phase == "backward" for _, phase in sequence):
            return None
        are_calls = len(set(forwards)) < len(forwards) or self.is_hooked(sequence)
        return self.recorder.pending() if are_calls else None

    def is_hooked(self, sequence: Sequence[SegmentKey]) -> bool:
        """Return whether hooks served the step of this ``sequence``, not graphs."""
        ran = {graph for graph, phase in sequence if phase != "inference"}
        return UNPLANNED in ran or any(isinstance(self.graphs[graph], SavedSequence) for graph in ran)

    def _describe(self, number: int) -> tuple[str, str]:
        return self.plans.describe(number, {graph for graph, _ in self.recorder.current_sequence})

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self in Session._open

    def close_with(self, model: nn.Module) -> None:
        """Close once ``model`` is freed."""
        self._owner = weakref.finalize(model, self.close)

    @classmethod
    def collect_closed(cls) -> None:
        """Free closed sessions that lie in cycles and hold optimizers, whose parameters and state would stay."""
        if cls._closed:
            gc.collect()

    def evict_with(self, backend: object) -> None:
        """Evict all traces once ``backend`` is garbage; pending backwards can still run."""
        self._owner = weakref.finalize(backend, self.traces.evict_all)

    def load(self, model: nn.Module) -> None:
        """Move ``model`` from the CPU to the device: large parameters to host copies, all else to device memory.

        Raises:
            OptionError: the device has no room for what cannot be swapped; the model is partly on it.
            TierError: the tier has no room; likewise.
        """
        with reported(f"{self.name}, moving it to {self.device}", "loading"):
            for tensor in (*model.parameters(), *model.buffers()):  # first: of a mapped file they keep all of it mapped
                if has_plain_storage(tensor) and tensor.untyped_storage().nbytes() < self.options.min_swap_bytes:
                    tensor.data = tensor.data.to(self.device)
            self.weights.load()
            try:
                model.to(self.device)
            except torch.OutOfMemoryError as error:
                kept = "; ".join(note for note in self.notes if "is not swapped" in note)
                raise OptionError(f"{self.device} has no room for what stays on it of {self.name}: {kept}") from error

    def restore(self) -> None:
        """Make weights and optimizer state resident; warn of what stays in host copies."""
        if not self.engine.host_copies or os.getpid() != self._process:  # a forked child has no engine
            return
        self.traces.evict_all()
        self.memory.trim()
        why = "something beside the model holds their memory, as a detached tensor or a numpy array does"
        try:
            left_bytes = self.weights.restore() + self.updates.restore()
        except torch.OutOfMemoryError as error:
            left_bytes = self.engine.host_copies.nbytes
            why = f"{self.device} has no room for them ({error})"
        if left_bytes:
            what = f"{format_bytes(left_bytes)} of {self.name}'s weights and optimizer state"
            warn(f"{what} stay in the memory of the {self.options.tier} tier: {why}", NotManaged)

    def close(self) -> None:
        """Free traces, host memory, files and threads, which a forked child leaves to its parent. Idempotent."""
        Session._open.discard(self)
        if self.updates:
            Session._closed.add(self)
        if self._owner is not None:
            self._owner.detach()
        self.updates.close()
        self.engine.close()
        self.memory.close()
        self.traces.evict_all()

    def flag_is_compiling(self, note: str) -> None:
        """Add ``note`` on code of the model that may take another path than in plain torch."""
        self.note_on_graphs(note)
        if self.verified is not None:
            self.verified.may_go_another_way = True

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes for reports; notes on graphs no longer in use name the steps that they ran."""
        if self._num_graph_steps is None:
            return *self.notes, *self._graph_notes, *self._order_notes
        if self._num_graph_steps == 0:
            return tuple(self.notes)
        ran = "step 1 ran" if self._num_graph_steps == 1 else f"steps 1 to {self._num_graph_steps} ran"
        return *self.notes, *(f"{ran} by graphs: {note}" for note in self._graph_notes)

    def note_on_graphs(self, note: str) -> None:
        """Add a sentence on what graphs compute, unless it is there already."""
        self._graph_notes.append_once(note)

    def left_graphs(self) -> None:
        """Note that hooks serve the model after the steps so far, the current one included."""
        self._num_graph_steps = self.recorder.num_steps + bool(self.recorder.current_sequence)

    def place_weights_too(self) -> bool:
        """Let plans place weights from now on, as no plan fits otherwise; whether that is new, and possible.

        Traces whose plans keep all weights are evicted.
        """
        can = self.device.type == "cuda" and self.options.weights == "auto" and can_swap_weights(self.options)
        if not can or self.weights.is_managed:
            return False
        try:
            self._manage_weights()
        except TierError as error:
            self.note_once(f"weights: the step does not fit with all of them, and none can be swapped: {error}")
            return False
        self.traces.evict_complete()
        self.note_once("weights: as the step does not fit with all of them, plans place them, too")
        return True

    def _manage_weights(self) -> None:
        weight_bytes = self.weights.manage()
        self.memory.count(weight_bytes + (self.budget.count_all_state() if self.updates else 0))
        self.updates.fetch_parameters()

    def _open_updates(
        self, state: TrainingState, machine: KnownMachine, pinned: PinnedPlans | None, undoing: ExitStack
    ) -> Updates:
        host_copies, min_bytes = self.engine.host_copies, self.options.min_swap_bytes
        gradients = StreamedGradients(state.parameters, host_copies, min_bytes=min_bytes)
        kind = CpuUpdates if state.updates_on_cpu else ChunkedUpdates
        of_each = [
            kind(
                each,
                host_copies,
                gradients,
                min_bytes=min_bytes,
                budget_bytes=self.budget.nbytes,
                memory=self.memory,
                make_room=self.make_room,
            )
            for each in state.optimizers
        ]
        updates = Updates(of_each, gradients, host_copies)
        undoing.callback(updates.close)
        if updates.on_cpu:
            undoing.callback(updates.restore)
            updates.keep_state_on_cpu(machine.now.tier(self.options.tier).held_bytes)
        elif updates and pinned is not None:
            undoing.callback(updates.restore)
            updates.stream_state_of(pinned.num_streamed)
            if pinned.streams_gradients and not self.options.verify and not is_distributed():
                gradients.stream()
            self.memory.trim()
        return updates

    def note_written(self, names: Collection[str]) -> None:
        """Note that steps write weights of these ``names``; evict traces whose plans may move them."""
        if self.weights.note_written(names):
            self.traces.evict_placing(frozenset(names))

    def note_once(self, note: str) -> None:
        """Add a sentence for reports, unless it is there already."""
        self.notes.append_once(note)

    def programs(self) -> Iterator[Program]:
        """Yield the programs of all graphs that are not evicted."""
        return (graph.program for graph in self.graphs if not isinstance(graph, Evicted))


def _free(native: _C.Engine, memory: DeviceMemory) -> None:
    native.close()
    memory.close()
