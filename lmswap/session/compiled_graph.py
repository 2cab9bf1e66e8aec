"""One graph of a step, captured or recorded by hooks: compiles it for its plan, and for each later plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from lmswap.analyze.memory import StepMemory
from lmswap.capture import aot
from lmswap.capture.aot_stages import Compiled
from lmswap.capture.lower import Lowered, lower
from lmswap.capture.merge_programs import graph_plan
from lmswap.capture.numerics.rounding_notes import numerics_note
from lmswap.capture.output_names import input_names, results
from lmswap.capture.specialize import Eviction, SizesOutgrown
from lmswap.capture.unsupported import FLEX_ATTENTION, has_flex_attention
from lmswap.errors import PlanInfeasible
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.costs import OpCosts
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.rewrite.insert import insert_swaps
from lmswap.rewrite.recompute import insert_recomputes
from lmswap.runtime.arena import SegmentOpenings, placing
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph, compile_boxed, copy_graph, insert_before, with_op_marks
from lmswap.runtime.numerics_settings import NumericsGuard
from lmswap.runtime.output_liveness import OutputLiveness, output_positions
from lmswap.runtime.partial_backward import (
    Around,
    Backward,
    PartialResults,
    Results,
    collect,
    compile_parts,
    insert_yield_markers,
    results_by_part,
    single_part,
)
from lmswap.runtime.step_record import SegmentKey
from lmswap.saved_tensors.plan_actions import PlannedEvents
from lmswap.saved_tensors.recording import Recorded, lower_recorded
from lmswap.session.graph_sizes import GraphSizes, seconds_of_similar
from lmswap.session.planned_step import Phase, PlannedStep
from lmswap.torch_compat.dynamo_cache import CacheEntry
from lmswap.torch_compat.process_groups import is_distributed
from lmswap.torch_compat.symbolic_sizes import Sizes, SymbolicRegion
from lmswap.training_state.weights import Placeable
from lmswap.verify.against_eager import EagerReference
from lmswap.verify.against_unswapped import REFERENCE, UnswappedReference

if TYPE_CHECKING:
    from lmswap.session.session import Session


_Code = TypeVar("_Code")


class CapturedGraph:
    """One region that Dynamo captured: its compiled function, and what replanning needs."""

    def __init__(self, session: Session, index: int, module: fx.GraphModule, symbolic: SymbolicRegion | None) -> None:
        """``symbolic``: None if all sizes are constants of the graph."""
        self.session, self.index = session, index
        self.entry: CacheEntry | Eviction = CacheEntry()
        self.sizes = GraphSizes(symbolic)
        self.last_step = session.recorder.num_steps  # how many steps had ended when it ran last
        self.input_names = input_names(module.graph)
        self.costs: OpCosts
        self.function: Callable[..., Any]
        self._compiled: Compiled
        self.may_round_otherwise = False
        self.follows: tuple[int, ...] = (index,)  # the graphs of the step whose plan it is compiled for
        self._placeable: Placeable | None = None  # weights, as long as it is not traced again
        self.again: list[CapturedGraph] = []  # for its second and later runs in a step, if planned separately
        self.handover = OutputLiveness()
        self._plain = self._plain_torch(module)

    def placeable_weights(self) -> Placeable:
        """Return the weights that its plans may place, the same for all of them."""
        if self._placeable is None:
            self._placeable = self.session.weights.placeable()
        return self._placeable

    def forget_placeable_weights(self) -> None:
        """Let its plans place what weights can be placed now."""
        self._placeable = None

    def clone_for_run(self, index: int) -> CapturedGraph:
        """Return the same region under another number, to be planned separately."""
        clone = copy.copy(self)
        clone.index, clone.sizes = index, self.sizes.for_other_graph()
        clone.again, clone.handover = [], OutputLiveness()
        return clone

    def for_sizes(self, sizes: Sizes, index: int, entry: Eviction) -> CapturedGraph:
        """Return the same region, to be planned for ``sizes`` and compiled by `capture_again`."""
        other = self.clone_for_run(index)
        other.sizes = self.sizes.for_other_graph(sizes)
        other.entry, other.follows, other._placeable = entry, (index,), None
        other.last_step = self.session.recorder.num_steps
        return other

    @property
    def program(self) -> Program:
        """The program of its trace, for its sizes."""
        return self.sizes.program

    @property
    def trace(self) -> object:
        """What graphs of one trace have in common."""
        return self.sizes.symbolic or self

    def graphs_of_trace(self) -> list[CapturedGraph]:
        """Return the graphs of its trace, this one included, in the order of their numbers."""
        return [each for each in self.session.graphs if isinstance(each, CapturedGraph) and each.trace is self.trace]

    def sizes_to_plan_for(self, sizes: Sizes) -> Iterator[Sizes]:
        """Yield sizes whose plans would serve ``sizes``, too, see `GraphSizes.to_plan_for`."""
        is_first = all(each.sizes.of_program == self.sizes.of_program for each in self.graphs_of_trace())
        return self.sizes.to_plan_for(sizes, is_first=is_first)

    def graph_for_this_run(self) -> CapturedGraph:
        """Return the graph for the next run of this region in the current step: this one, or one of its clones."""
        if not self.again:
            return self
        ran = {index for index, phase in self.session.recorder.current_sequence if phase == "forward"}
        runs = [self, *self.again]
        return next((run for run in runs if run.index not in ran), self)

    def capture(self, module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Any]) -> None:
        """Trace the region, plan it by itself and compile it.

        Args:
            module: Dynamo's graph; it is consumed.
            inputs: its inputs, which may be fake.
            given: the real tensors among them.
        """
        if self.session.options.compiler == "fx" and has_flex_attention(module):
            self.session.note_on_graphs(FLEX_ATTENTION)
        compile_region = _region_compiler(self.session.options.compiler)
        started = perf_counter()
        self._take(compile_region(module, inputs, _PlannedGraph(self), given))
        self.sizes.borrowed.planning_seconds = perf_counter() - started

    def capture_again(self) -> None:
        """Plan and compile the region, as it was traced, for its sizes; see `for_sizes`."""
        started = perf_counter()
        self._take(self._compiled.compile_for(self.sizes.of_program, _PlannedGraph(self)))
        self.sizes.borrowed.planning_seconds = perf_counter() - started

    @property
    def unmoved_bytes(self) -> int:
        """The peak of its own tensors, for the sizes that its plan is made for, if it moved none."""
        return self.sizes.unmoved_bytes(self.sizes.of_plan, self.costs)

    def fit(self, sizes: Sizes | None) -> None:
        """Let its plan serve a call of ``sizes``, and so be in use; None are those of the trace.

        Raises:
            SizesOutgrown: the plan has no room for them, or one of their own pays.
        """
        if sizes is not None and self.sizes.vary and not self.sizes.fit(sizes):
            if not self.session.may_share_plans:
                raise SizesOutgrown
            step = self.session.plans[self.follows]
            fitted = self.sizes.make_fit(sizes, step, self._first_buffer(step), self.costs)
            if fitted is not step:
                self.session.plans.store(fitted)
        self.last_step = self.session.recorder.num_steps

    def begin_run(self, sizes: Sizes | None) -> None:
        """Note that a call of ``sizes`` runs in the current step."""
        if sizes is not None and self.sizes.vary:
            self.sizes.begin_run(sizes)

    def program_of_run(self) -> Program:
        """Return its program for the sizes of its last run."""
        own, ran = self.sizes.of_program, self.sizes.of_run
        return self.program if ran == own else self.sizes.program_for(self.program, 0, ran)

    def as_it_ran(self, step: PlannedStep) -> PlannedStep:
        """Return ``step``, the plan that it follows, for the sizes of its last run."""
        sizes = self.sizes
        return step if sizes.of_run == sizes.of_plan else sizes.step_for(step, self._first_buffer(step), sizes.of_run)

    def _first_buffer(self, step: PlannedStep) -> int:
        """Return the number of its first buffer in ``step``."""
        return step.merged.buffer_offsets[step.graphs.index(self.index)]

    def seconds_of_other_sizes(self, program: Program) -> Sequence[float]:
        """Return the seconds of the ops of ``program``, as steps of similar sizes have shown; empty if none have."""
        others = (each for each in reversed(self.graphs_of_trace()) if each is not self)
        steps = (self.session.plans.get((each.index,)) for each in others)
        return next(filter(None, (seconds_of_similar(step, program) for step in steps if step is not None)), ())

    def follow(self, graphs: tuple[int, ...]) -> None:
        """Compile the region, as it was traced, for its part of the plan of the step of ``graphs``."""
        self.follows = graphs
        self._take(self._compiled.compile_again(_PlannedGraph(self, graphs)))

    def release(self) -> None:
        """Free what runs the region; pending backwards keep theirs.

        Dynamo holds this object longer than its entry: at a graph break, by the code that it generated for the rest.
        """
        del self._compiled, self.function, self.session
        self.handover = OutputLiveness()

    def keep_sizes(self, lowered: Lowered, plan: Plan) -> None:
        """Let the graphs run with the sizes of each call, if ``plan`` can move tensors whose sizes are not known."""
        self.sizes.keep(lowered, plan)
        if plan.moves and not (self.sizes.are_kept and self.session.may_share_plans):
            self.sizes.plan_for_own()
            for graph in lowered.graphs:
                graph.inline_sizes()

    def _take(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.sizes.fitting.clear()
        self.session.memory.compact()
        self.function = self._plain.wrap(compiled) if self._plain else compiled

    def _plain_torch(self, module: fx.GraphModule) -> EagerReference | None:
        """Return the eager reference that verifies the region; None without verification."""
        session = self.session
        if session.verified is None or session.options.compiler != "fx":
            return None
        return EagerReference(
            copy.deepcopy(module),
            self.input_names,
            device=session.device,
            verified=session.verified,
            recorder=session.recorder,
            may_round_otherwise=lambda: self.may_round_otherwise,
        )


class _Running:
    """Records runs of a segment, from its first op to its last; a generator would cost the host twice as much."""

    def __init__(
        self,
        session: Session,
        graph: CapturedGraph,
        phase: str,
        follows: tuple[int, ...],
        first_runs: NumericsGuard | None,
    ) -> None:
        """``follows`` is the plan; ``first_runs`` compares the settings of ops that the backward recomputes."""
        self._session, self._graph, self._follows, self._first_runs = session, graph, follows, first_runs
        self._key: SegmentKey = (graph.index, phase)
        self._recorder, self._own, self._start = session.recorder, session.recorder.own, 0

    def __enter__(self) -> None:
        self._own.seconds -= perf_counter()
        self._session.engine.check_open()
        graph, phase = self._key
        if self._first_runs is not None:
            self._first_runs.begins(phase)
        self._session.losses.before_segment(graph, phase)
        self._start = self._recorder.begin_segment(self._key)
        self._own.seconds += perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        session, (graph, phase) = self._session, self._key
        self._own.seconds -= perf_counter()
        self._recorder.end_segment(self._key, self._start, self._follows)
        if kind is None:
            session.engine.check_async_errors()
            session.losses.after_segment(graph, phase, self._graph.program_of_run)
            is_alone = phase == "forward" and len(self._recorder.pending_sequence) == 1  # its backward may follow
            if phase != "inference" and not is_alone:
                session.warn_budget_exceeded()
            if phase != "forward" and self._recorder.is_complete:
                session.make_room()
        self._own.seconds += perf_counter()


class _PlannedGraph(aot.GraphHandler):
    """Handles the graphs of one region for one plan.

    A backward that runs by it may belong to a plan that is not active any more.
    """

    def __init__(self, graph: CapturedGraph, step: tuple[int, ...] = ()) -> None:
        """``step`` are the graphs of the step whose plan it follows; none: the region is planned by itself."""
        self._graph, self._session, self._step = graph, graph.session, step
        self._segments: dict[str, SegmentGraph] = {}  # rewritten, by phase
        self._scripts: dict[str, SegmentOpenings] = {}  # by phase: the offsets of its tensors, with an arena
        self._first_runs: NumericsGuard | None = None  # of ops that the backward recomputes
        self._adds_up = False  # each gradient is accumulated as it is computed
        self.own = graph.session.recorder.own

    def output_metadata(self, node: fx.Node) -> Sequence[torch.Tensor] | None:
        """See `lmswap.capture.aot.GraphHandler`."""
        return self._session.meter.output_metadata(node)

    def note(self, text: str) -> None:
        """See `lmswap.capture.aot.GraphHandler`."""
        self._session.note_on_graphs(text)

    def parameter_names(self) -> Mapping[int, str]:
        """See `lmswap.capture.aot.GraphHandler`."""
        return self._session.weights.names()

    def differentiated_twice(self) -> str:
        """See `lmswap.capture.aot.GraphHandler`."""
        return self._session.differentiated_twice()

    def edit(self, graphs: Sequence[SegmentGraph], parameters: Mapping[int, str]) -> None:
        """See `lmswap.capture.aot.GraphHandler`."""
        session, lowered = self._session, self._lower(graphs, parameters)
        note = numerics_note(lowered)
        self._graph.may_round_otherwise = note is not None
        if note and session.options.compiler == "fx":
            session.note_on_graphs(note)
        if not self._step:
            try:
                session.planning.plan_captured(self._graph, lowered)
            except PlanInfeasible:
                if not session.place_weights_too():
                    raise
                self._graph.forget_placeable_weights()
                lowered = self._lower(graphs, parameters)
                session.planning.plan_captured(self._graph, lowered)
        self._rewrite(lowered)

    def compiled(self, module: fx.GraphModule, phase: str) -> BoxedFunction:
        """See `lmswap.capture.aot.GraphHandler`."""
        function, segment, recorder = compile_boxed(module), self._segments[phase], self._session.recorder
        timed = self._timed(compile_boxed, segment) or function
        positions, handover = output_positions(segment, self._graph.program), self._graph.handover
        arena, script, running = self._session.engine.arena, self._scripts.get(phase), self.running(phase)

        def run(arguments: list[Any]) -> Any:
            code = timed if recorder.times_ops else function
            with placing(arena, script) as allocating, running, allocating():
                values = code(arguments)
            handover.after_forward(values, positions)
            return values

        reference: UnswappedReference | None = module.meta.get(REFERENCE)
        return reference.wrap(run, phase) if reference else run

    def compiled_backward(self, module: fx.GraphModule) -> Backward:
        """See `lmswap.capture.aot.GraphHandler`."""
        parts, segment, recorder = compile_parts(module), self._segments["backward"], self._session.recorder
        timed = self._timed(compile_parts, segment) or parts
        positions, handover = output_positions(segment, self._graph.program), self._graph.handover
        arena, script = self._session.engine.arena, self._scripts.get("backward")
        gradients, names = self._session.updates.gradients, self._gradients_by_part(segment)

        def run(arguments: list[Any]) -> Generator[Results, None, None]:
            code = timed if recorder.times_ops else parts
            handover.before_backward(arguments, positions)
            adds_up = self._adds_up and self._session.retention.have_gradients()
            # A context of its own: an interrupted run's may be left only after the next one has begun.
            with placing(arena, script, adds_up=adds_up) as allocating, self.running("backward"):
                around = allocating
                if gradients.are_streamed:
                    streamed = gradients.of_backward(names)
                    around = partial(_nested, streamed.around_part, allocating)
                yield from code(arguments, around)
            handover.after_backward()

        def begin(arguments: list[Any]) -> PartialResults:
            return self._session.register_backward(run(arguments))

        reference: UnswappedReference | None = module.meta.get(REFERENCE)
        if reference is None:
            return begin
        return single_part(reference.wrap(lambda arguments: collect(begin(arguments)), "backward"))

    def _timed(self, compile_graph: Callable[[fx.GraphModule], _Code], segment: SegmentGraph) -> _Code | None:
        """Compile ``segment`` with marks of its ops, for a step that times them; None if there will be none.

        In other steps marks would cost time. Compiling takes 20 KiB per op, for which that step has no memory.
        """
        if self._session.plans[self._follows].history.phase >= Phase.CALIBRATED:
            return None
        return with_op_marks(compile_graph, segment, self._session.recorder.begin_op)

    def _gradients_by_part(self, segment: SegmentGraph) -> list[list[str]]:
        """Return, by part of the backward, the names of the parameters whose gradients it completes."""
        program, results = self._graph.program, list(segment.output.args[0])  # type: ignore[arg-type]
        names = {gradient: program.buffers[parameter].name for parameter, gradient in program.gradients}
        buffers = [
            [segment.buffer_of.get(results[each]) for each in part] for part in results_by_part(segment.fx_graph)
        ]
        return [[names[buffer] for buffer in part if buffer in names] for part in buffers]

    def running(self, phase: str) -> _Running:
        """See `lmswap.capture.aot.GraphHandler`."""
        return _Running(self._session, self._graph, phase, self._follows, self._first_runs)

    def register_backward(self, parts: Generator[Results, None, None]) -> PartialResults:
        """See `lmswap.capture.aot.GraphHandler`."""
        return self._session.register_backward(parts)

    @property
    def _follows(self) -> tuple[int, ...]:
        """The graphs of the step whose plan it follows, as records name the plan."""
        return self._step or (self._graph.index,)

    def _lower(self, graphs: Sequence[SegmentGraph], parameters: Mapping[int, str]) -> Lowered:
        session, placeable = self._session, self._graph.placeable_weights()
        lowered = lower(
            graphs,
            parameters=parameters,
            name=session.name,
            weights=placeable.names,
            trained=placeable.trained,
            is_deterministic=session.meter.is_deterministic,
        )
        self._graph.sizes.take(lowered)
        session.note_written(lowered.written)
        return lowered

    def _rewrite(self, lowered: Lowered) -> None:
        """Edit the lowered graphs for their part of the plan."""
        session, step = self._session, self._session.plans[self._follows]
        which = step.graphs.index(self._graph.index)
        plan = graph_plan(step.merged, step.plan, which, lowered.program)
        self._graph.keep_sizes(lowered, plan)
        reference = self._reference(lowered, plan)
        runs, graphs = insert_recomputes(lowered.program, lowered.graphs, plan.recomputes)
        insert_swaps(runs, graphs, plan, engine=session.engine.number, first_buffer=step.merged.buffer_offsets[which])
        self._segments = {graph.phase: graph for graph in graphs}
        self._first_runs = None
        if plan.recomputes and "backward" in self._segments:
            self._first_runs = NumericsGuard(session.name, session.device)
        self._adds_up = step.adds_up
        self._scripts = {} if step.places is None else dict(self._write_scripts(step, step.places, graphs))
        if reference:
            reference.join(graphs)
        elif (is_distributed() or self._adds_up) and "backward" in self._segments:
            insert_yield_markers(self._segments["backward"])

    def _write_scripts(
        self, step: PlannedStep, places: ArenaLayout, graphs: Sequence[SegmentGraph]
    ) -> Iterator[tuple[str, SegmentOpenings]]:
        """Insert openings of the arena into each graph, and yield their scripts; copies in open slots by themselves."""
        assert self._session.engine.arena is not None
        which = step.graphs.index(self._graph.index)
        segments = schedule(step.merged.program, step.plan.recomputes).program.segments
        own = [segment for segment in segments if segment.graph == which]
        for segment, graph in zip(own, graphs, strict=True):
            openings = [opening for opening in places.openings if segment.start <= opening.position < segment.stop]
            ops = [opening.position - segment.start for opening in openings if not opening.is_prefetch]
            insert_before(graph, ops, self._session.engine.arena.open_next)
            yield graph.phase, SegmentOpenings([opening.slots for opening in openings], places.arena_bytes)

    def _reference(self, lowered: Lowered, plan: Plan) -> UnswappedReference | None:
        """Return the unswapped reference that verifies the graphs; None without verification, or if nothing moves."""
        session, program = self._session, lowered.program
        if session.verified is None or session.options.compiler != "fx" or not plan.moves:
            return None
        decisions = schedule(program, plan.recomputes).decisions(plan)
        moved = {buffer for buffer, decision in enumerate(decisions) if decision is not Decision.KEEP}
        graphs = [copy_graph(graph) for graph in lowered.graphs]
        described = [results(graph, self._graph.input_names, moved, program.buffer_names) for graph in graphs]
        device, verified, recorder = session.device, session.verified, session.recorder
        return UnswappedReference(program, graphs, described, device=device, verified=verified, recorder=recorder)


@contextmanager
def _nested(outer: Around, inner: Around) -> Iterator[None]:
    with outer(), inner():
        yield


class SavedSequence:
    """A step that was recorded by saved-tensor hooks, instead of a captured graph."""

    def __init__(self, session: Session, index: int, recorded: Recorded) -> None:
        self._session, self.index, self._recorded = session, index, recorded
        self.program, self.costs = lower_recorded(recorded, session.name)
        self.events: PlannedEvents

    def spare_bytes(self, growth: float, in_use_bytes: int) -> int:
        """Return how many bytes a step like this one, but in another order, may keep on the device of what it saves.

        ``growth``: how many times as much memory it takes; ``in_use_bytes`` are in use outside of it.
        """
        step_bytes = self._session.plans[self.index,].allowance.with_growth(in_use_bytes).step_bytes
        tight = (step_bytes - math.ceil(growth * other) for all_, other in self._needs if growth * all_ > step_bytes)
        return min(tight, default=step_bytes)

    @cached_property
    def _needs(self) -> list[tuple[int, int]]:
        """Of each op: bytes while it runs if all saved tensors are kept, and without those that it does not use."""
        buffers, scratch_bytes = self.program.buffers, self.costs.scratch_bytes
        used = (sum(buffers[each].nbytes for each in {*op.reads, *op.writes}) for op in self.program.ops)
        others = (scratch + own for scratch, own in zip(scratch_bytes, used, strict=True))
        return [*zip(StepMemory(self.program, self.costs).curve.tolist(), others, strict=True)]

    def follow(self, graphs: tuple[int, ...]) -> None:
        """Follow the plan of the step of ``graphs``, in steps that begin from now on."""
        self.events = PlannedEvents(self.index, self._recorded, self._session.plans[graphs].plan)


@dataclass(frozen=True)
class Evicted:
    """Stands for a graph whose trace was evicted; another graph is captured if it is needed."""

    index: int


Graphs = list[CapturedGraph | SavedSequence | Evicted]


def planned_graph(graphs: Graphs, index: int) -> CapturedGraph | SavedSequence:
    """Return a graph that is not evicted, as that of a plan."""
    graph = graphs[index]
    assert not isinstance(graph, Evicted)
    return graph


def assign_run_indices(graphs: Graphs, ran: Sequence[int]) -> tuple[int, ...]:
    """Return a graph for each run of ``ran``: repeated ones get clones in ``graphs``, which are planned separately."""
    runs: list[int] = []
    for index in ran:
        graph = graphs[index]
        assert isinstance(graph, CapturedGraph)
        number = sum(run in runs for run in (index, *(other.index for other in graph.again)))
        if number > len(graph.again):
            graph.again.append(graph.clone_for_run(len(graphs)))
            graphs.append(graph.again[-1])
        runs.append(index if number == 0 else graph.again[number - 1].index)
    return tuple(runs)


def _region_compiler(compiler: str) -> Callable[..., Compiled]:
    if compiler == "inductor":
        from lmswap.capture.inductor import backend  # here: it takes seconds to import

        return backend.compile_region
    return aot.compile_region
