"""One graph of a step, captured or recorded by hooks: compiles it for its plan, and for each later plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from lmswap.analyze.memory import StepMemory
from lmswap.capture import aot
from lmswap.capture.aot_stages import Compiled
from lmswap.capture.caller_memory import tangent_bytes
from lmswap.capture.lower import Lowered, lower
from lmswap.capture.merge_programs import graph_plan
from lmswap.capture.numerics.gradient_order import is_distributed
from lmswap.capture.numerics.rounding_notes import numerics_note
from lmswap.capture.output_names import input_names, results
from lmswap.capture.size_buckets import bucket_edge
from lmswap.capture.specialize import Eviction, SizesOutgrown
from lmswap.capture.unsupported import FLEX_ATTENTION, has_flex_attention
from lmswap.errors import PlanInfeasible
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.costs import OpCosts
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import LOSS, Op, Program
from lmswap.ir.schedule import schedule
from lmswap.planner import simulate
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
from lmswap.session.borrowed_plans import BorrowedPlans
from lmswap.session.planned_step import Phase, PlannedStep
from lmswap.torch_compat.dynamo_cache import CacheEntry
from lmswap.torch_compat.sized_graphs import is_sized
from lmswap.torch_compat.symbolic_sizes import BufferGrowth, Sizes, SymbolicRegion
from lmswap.training_state.weights import Placeable
from lmswap.verify.against_eager import EagerReference
from lmswap.verify.against_unswapped import REFERENCE, UnswappedReference

if TYPE_CHECKING:
    from lmswap.session.session import Session


_Code = TypeVar("_Code")

_MAX_FITTING = 1024  # sizes that are known to fit: numbers may be new in each step
_MAX_LESS = 4  # by which the largest sizes of a bucket that can be planned are searched below its edge
# A plan serves sizes of other buckets, too, if without swaps they take nearly the memory that it is made for.
_NEAR = 1.1
# Seconds of an op are known from sizes whose steps take up to this factor more or fewer bytes: those of the next bucket
# are at most 1.25 times as large, and take at most the square of that.
_SIMILAR = 1.6


class CapturedGraph:
    """One region that Dynamo captured: its compiled function, and what replanning needs."""

    def __init__(self, session: Session, index: int, module: fx.GraphModule, symbolic: SymbolicRegion | None) -> None:
        """``symbolic``: None if all sizes are constants of the graph."""
        self.session, self.index = session, index
        self.entry: CacheEntry | Eviction = CacheEntry()
        self._symbolic = symbolic
        self._growth: BufferGrowth | None = None  # of its program's buffers, with sizes
        self._sizes: Sizes = symbolic.sizes if symbolic is not None else {}  # of its program
        self._planned_for = self._ran_for = self._sizes  # that its plan has room for, and of its last run
        self._keeps_sizes = True  # its code runs with those of each call
        # Other sizes that its plan has room for; by these, the seconds that a run loses to moves for larger sizes.
        self._fitting: dict[frozenset[Any], float] = {}
        self._borrowed = BorrowedPlans()  # of all graphs of its trace
        self.last_step = session.recorder.num_steps  # how many steps had ended when it ran last
        self.input_names = input_names(module.graph)
        self.program: Program
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
        clone.index, clone.again, clone.handover, clone._fitting = index, [], OutputLiveness(), {}
        return clone

    def for_sizes(self, sizes: Sizes, index: int, entry: Eviction) -> CapturedGraph:
        """Return the same region, to be planned for ``sizes`` and compiled by `capture_again`."""
        other = self.clone_for_run(index)
        other._sizes = other._planned_for = other._ran_for = sizes
        other.entry, other.follows, other._placeable = entry, (index,), None
        other.last_step = self.session.recorder.num_steps
        return other

    @property
    def trace(self) -> object:
        """What graphs of one trace have in common."""
        return self._symbolic or self

    def graphs_of_trace(self) -> list[CapturedGraph]:
        """Return the graphs of its trace, this one included, in the order of their numbers."""
        return [each for each in self.session.graphs if isinstance(each, CapturedGraph) and each.trace is self.trace]

    @property
    def has_sizes(self) -> bool:
        """Whether its trace serves sizes that vary."""
        return self._symbolic is not None

    def sizes_to_plan_for(self, sizes: Sizes) -> Iterator[Sizes]:
        """Yield sizes whose plans would serve ``sizes``, too, the best first; at last these themselves.

        They are those of its bucket, and at the first time the declared ones: others run by their plan at once.
        """
        assert self._symbolic is not None
        largest = self._symbolic.largest(sizes)
        is_first = all(each._sizes == self._sizes for each in self.graphs_of_trace())
        if largest != sizes and is_first and self._symbolic.serves(largest):
            yield largest
        edges = {symbol: bucket_edge(size) for symbol, size in sizes.items()}
        more = min((edge - sizes[symbol] for symbol, edge in edges.items()), default=0)
        # Sizes may have to be odd, or the sum of others.
        each = (
            {symbol: max(sizes[symbol], edge - less) for symbol, edge in edges.items()} for less in range(_MAX_LESS)
        )
        # Or to differ by as much as here: the rows of tokens[:, :-1] are one apart.
        together = (
            {symbol: size + more - less for symbol, size in sizes.items()} for less in range(min(more, _MAX_LESS))
        )
        served = (those for those in (*each, *together) if those != sizes and self._symbolic.serves(those))
        yield from islice(served, 1)
        yield sizes

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
        self.session.engine.release_cached()  # for its ops, which run on trial
        self.session.memory.decommit(self.session.memory.reusable_bytes())  # for the trace
        if self.session.options.compiler == "fx" and has_flex_attention(module):
            self.session.note_on_graphs(FLEX_ATTENTION)
        compile_region = _region_compiler(self.session.options.compiler)
        started = perf_counter()
        self._take(compile_region(module, inputs, _PlannedGraph(self), given))
        self._borrowed.planning_seconds = perf_counter() - started

    def capture_again(self) -> None:
        """Plan and compile the region, as it was traced, for its sizes; see `for_sizes`."""
        started = perf_counter()
        self._take(self._compiled.compile_for(self._sizes, _PlannedGraph(self)))
        self._borrowed.planning_seconds = perf_counter() - started

    @property
    def unmoved_bytes(self) -> int:
        """The peak of its own tensors, for the sizes that its plan is made for, if it moved none."""
        return self._unmoved_bytes(self._planned_for)

    def fit(self, sizes: Sizes | None) -> None:
        """Let its plan serve a call of ``sizes``, and so be in use; None are those of the trace.

        Raises:
            SizesOutgrown: the plan has no room for them, or one of their own pays.
        """
        if sizes is not None and sizes != self._planned_for and self._symbolic is not None:
            self._fit_others(sizes)
        self.last_step = self.session.recorder.num_steps

    def begin_run(self, sizes: Sizes | None) -> None:
        """Note that a call of ``sizes`` runs in the current step."""
        if sizes is not None and self._symbolic is not None:
            self._ran_for = sizes
            if lost_seconds := self._fitting.get(frozenset(sizes.items()), 0.0):
                self._borrowed.note_run(sizes, lost_seconds)
                if self._borrowed.have_cost_a_plan(sizes):
                    self._fitting.clear()

    def _fit_others(self, sizes: Sizes) -> None:
        if (key := frozenset(sizes.items())) in self._fitting:
            return
        if not self._keeps_sizes or not self.session.may_share_plans:
            raise SizesOutgrown
        assert self._growth is not None
        step, lost_seconds = self.session.plans[self.follows], 0.0
        if step.moves:
            if not self._has_tier_room(sizes, step):
                raise SizesOutgrown
            if not self._is_near(sizes):
                if self._borrowed.have_cost_a_plan(sizes):
                    raise SizesOutgrown
                lost_seconds = _excess_seconds(self._step_for(step, sizes))
        if not self._growth.is_within(sizes, self._planned_for):
            self._plan_for(sizes, step)
        if len(self._fitting) >= _MAX_FITTING:
            self._fitting.clear()
        self._fitting[key] = lost_seconds

    def _has_tier_room(self, sizes: Sizes, step: PlannedStep) -> bool:
        """Whether what the plan of ``step`` swaps takes no more of its tier for ``sizes``."""
        assert self._growth is not None
        first = step.merged.buffer_offsets[step.graphs.index(self.index)]
        runs = schedule(step.merged.program, step.plan.recomputes)
        swapped = {runs.buffers[swap.buffer] - first for swap in step.plan.swaps}
        return self._growth.is_within(sizes, self._planned_for, swapped)

    def _is_near(self, sizes: Sizes) -> bool:
        """Whether a plan that moves tensors is not made for much larger ``sizes``: it would move more than needed."""
        planned = self._planned_for
        if all(bucket_edge(size) == bucket_edge(planned[symbol]) for symbol, size in sizes.items()):
            return True
        return self.unmoved_bytes <= _NEAR * self._unmoved_bytes(sizes)

    def _unmoved_bytes(self, sizes: Sizes) -> int:
        return StepMemory(self._program_for(self.program, 0, sizes), self.costs).peak.nbytes

    def _plan_for(self, sizes: Sizes, step: PlannedStep) -> None:
        """Let ``step`` be planned for ``sizes``, too; it fits, or they do not."""
        needed = self._step_for(step, sizes)
        if needed.excess_bytes > 0:
            raise SizesOutgrown
        if not step.moves and needed.tensor_peak_bytes > step.tensor_peak_bytes:
            self.session.plans.store(needed)
            self._planned_for = sizes

    def plan_for_own_sizes(self) -> None:
        """Note that a plan is made for the sizes of its program."""
        self._planned_for = self._sizes
        self._fitting.clear()

    def program_of_run(self) -> Program:
        """Return its program for the sizes of its last run."""
        return self.program if self._ran_for == self._sizes else self._program_for(self.program, 0, self._ran_for)

    def as_it_ran(self, step: PlannedStep) -> PlannedStep:
        """Return ``step``, the plan that it follows, for the sizes of its last run."""
        return step if self._ran_for == self._planned_for else self._step_for(step, self._ran_for)

    def seconds_of_other_sizes(self, program: Program) -> Sequence[float]:
        """Return the seconds of the ops of ``program``, as steps of similar sizes have shown; empty if none have."""
        shown = (each._seconds_for(program) for each in reversed(self.graphs_of_trace()) if each is not self)
        return next(filter(None, shown), ())

    def _seconds_for(self, program: Program) -> Sequence[float]:
        """Return the seconds of the ops of ``program``, its own for other sizes, as its steps have shown.

        It is empty if they have not, or if their sizes are much smaller or larger.
        """
        step = self.session.plans.get((self.index,))
        if step is None or step.history.phase < Phase.CALIBRATED or not _are_same_ops(step.merged.program, program):
            return ()
        costs = _scaled(step.costs, step.merged.program, program)
        peaks = StepMemory(step.merged.program, step.costs).peak.nbytes, StepMemory(program, costs).peak.nbytes
        return costs.seconds if max(peaks) <= _SIMILAR * min(peaks) else ()

    def _step_for(self, step: PlannedStep, sizes: Sizes) -> PlannedStep:
        """Return ``step`` for other ``sizes`` of this graph.

        Time and scratch of an op are assumed to grow as its buffers do.
        """
        program, first = step.merged.program, step.merged.buffer_offsets[step.graphs.index(self.index)]
        sized = self._program_for(program, first, sizes)
        costs = _scaled(step.costs, program, sized)
        predicted = simulate(sized, costs, step.machine, step.plan)
        plan = replace(step.plan, predicted_peak_bytes=predicted.peak_bytes, predicted_seconds=predicted.seconds)
        return replace(step, merged=replace(step.merged, program=sized), costs=costs, plan=plan)

    def _program_for(self, program: Program, first: int, sizes: Sizes) -> Program:
        """Return ``program``, in which buffers of this graph begin at ``first``, for other ``sizes`` of this graph."""
        buffers = list(program.buffers)
        assert self._growth is not None
        for own, factor in self._growth.factors(sizes, self._sizes):
            nbytes = math.ceil(factor * self.program.buffers[own].nbytes)
            buffers[first + own] = replace(buffers[first + own], nbytes=nbytes)
        return replace(program, buffers=tuple(buffers))

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

    def take_lowered(self, lowered: Lowered) -> None:
        """Take the program of its trace."""
        self.program = lowered.program
        self._growth = BufferGrowth(lowered.symbolic_bytes)

    def keep_sizes(self, lowered: Lowered, plan: Plan) -> None:
        """Let the graphs run with the sizes of each call, if ``plan`` can move tensors whose sizes are not known."""
        moved = {swap.buffer for swap in plan.swaps}.union(
            *((*lowered.program.ops[each.op].reads, *lowered.program.ops[each.op].writes) for each in plan.recomputes)
        )
        nodes = ((node, buffer) for graph in lowered.graphs for node, buffer in graph.buffer_of.items())
        self._keeps_sizes = all(is_sized(node, self._sizes) for node, buffer in nodes if buffer in moved)
        if moved and not (self._keeps_sizes and self.session.may_share_plans):
            self.plan_for_own_sizes()
            for graph in lowered.graphs:
                graph.inline_sizes()

    def _take(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._fitting.clear()
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
        gradients, names = self._session.gradients, self._gradients_by_part(segment)

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
        self._graph.take_lowered(lowered)
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

    def spare_bytes(self, growth: float) -> int:
        """Return how many bytes a step like this one, but in another order, may keep on the device of what it saves.

        ``growth``: how many times as much memory it takes.
        """
        step_bytes = self._session.plans[self.index,].allowance.step_bytes
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


def _excess_seconds(step: PlannedStep) -> float:
    return step.plan.predicted_seconds - step.costs.free_seconds if step.moves else 0.0


def _are_same_ops(program: Program, sized: Program) -> bool:
    """Whether two programs of one trace differ in the bytes of their buffers alone."""
    ops = [[(op.target, op.reads, op.writes) for op in each.ops] for each in (program, sized)]
    return ops[0] == ops[1] and len(program.buffers) == len(sized.buffers)


def _scaled(costs: OpCosts, program: Program, sized: Program) -> OpCosts:
    """Return ``costs``, of ``program``, for the buffers of ``sized``: time and scratch of an op grow as they do."""

    def nbytes(op: Op, of: Program) -> int:
        if op.target == LOSS:
            return tangent_bytes(of, op)
        return sum(of.buffers[buffer].nbytes for buffer in {*op.reads, *op.writes})

    def share(op: Op) -> float:
        before = nbytes(op, program)
        return nbytes(op, sized) / before if before else 1.0

    shares = [share(op) for op in program.ops]
    scratch = {i: math.ceil(share * costs.scratch_bytes[i]) for i, share in enumerate(shares) if share != 1}
    seconds = tuple(share * each for share, each in zip(shares, costs.seconds, strict=True))
    return replace(costs.with_scratch(scratch), seconds=seconds)


def _region_compiler(compiler: str) -> Callable[..., Compiled]:
    if compiler == "inductor":
        from lmswap.capture.inductor import backend  # here: it takes seconds to import

        return backend.compile_region
    return aot.compile_region
