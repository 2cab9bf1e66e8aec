"""Captures a model's graphs, as the backend of Dynamo: traces, plans and compiles each, once for all of its sizes."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import fx

from lmswap.capture.aot import without_hooks
from lmswap.capture.interrupts import interrupt_in
from lmswap.capture.numerics.checkpoint_regions import refuse_effects
from lmswap.capture.recompiles import MAX_GRAPHS
from lmswap.capture.specialize import Captured, Eviction, NotSymbolic, SizesOutgrown, has_dynamic_sizes, specialize
from lmswap.capture.unsupported import refuse_forward_mode, refuse_numpy, refuse_streams
from lmswap.errors import CaptureError, LmswapError, PlanInfeasible
from lmswap.progress import reported, stage
from lmswap.session.compiled_graph import CapturedGraph
from lmswap.torch_compat.dynamo import RestartAnalysis, SkipFrame
from lmswap.torch_compat.symbolic_sizes import Sizes, SymbolicRegion

if TYPE_CHECKING:
    from lmswap.session.session import Session

_log = logging.getLogger(__name__)


def compile_graph(session: Session, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile Dynamo's graph ``module`` for the model of ``session``; return the function that runs instead of it.

    Raises:
        SkipFrame: it cannot be captured, and hooks are to serve the model's own code.
        CaptureError: it cannot be captured.
        PlanInfeasible: no plan fits the budget.
    """
    reference = weakref.ref(session)  # graphs must not hold it
    capture = partial(_capture, reference)
    if not has_dynamic_sizes(module, takes_floats=session.runs_uncaptured):
        return capture(module, inputs, inputs)

    def reach_limit() -> None:
        if (session := reference()) is not None:
            session.reach_trace_limit()

    return specialize(
        module,
        inputs,
        capture,
        keeps_symbols=session.may_share_plans,
        max_captures=MAX_GRAPHS if session.runs_uncaptured else None,
        at_limit=reach_limit,
    )


def _capture(  # noqa: PLR0917 - as `Capture`
    reference: weakref.ref[Session],
    module: fx.GraphModule,
    inputs: Sequence[Any],
    given: Sequence[Any],
    symbolic: SymbolicRegion | None = None,
    entry: Eviction | None = None,
) -> Captured:
    """Compile one graph, see `Capture`; ``entry``: None if it is one of Dynamo's."""
    session = reference()
    assert session is not None
    session.make_room_to_trace()
    session.traces.begin()
    graph = CapturedGraph(session, len(session.graphs), module, symbolic)
    if entry is not None:
        graph.entry = entry
    session.graphs.append(graph)
    session.mark_prepared()
    try:
        with without_hooks(), reported(f"{session.name}, a new graph", "tracing"):
            refuse_forward_mode()
            refuse_streams(module)
            refuse_effects(module)
            if session.runs_uncaptured:
                refuse_numpy(module)
            graph.capture(module, inputs, given)
    except BaseException as error:
        session.discard(graph)
        if symbolic is not None and _is_of_capture(error):
            _log.info("%s: sizes of a graph stay constants: %s", session.name, error)
            raise NotSymbolic from error
        if not session.runs_uncaptured or not _is_of_capture(error):
            raise
        # torch appends a page of traceback, which is for the log.
        reason = next(iter(str(error).strip().splitlines()), "no message")
        note = f"a graph could not be planned for: {type(error).__name__}: {reason}"
        session.note_once(note)
        _log.warning("%s: %s", session.name, note)
        # As text: a handler that keeps records would keep the frames, and so the tensors, of the first step.
        _log.debug("%s", "".join(traceback.format_exception(error)))
        # Dynamo then runs the user's own code; its graph may be no substitute for that.
        raise SkipFrame(note) from error
    session.num_captured += 1
    _log.info("%s: captured graph %d, of %d ops", session.name, graph.index, len(graph.program.ops))
    return _GraphCall(session, graph)


def _capture_for_sizes(graph: CapturedGraph, sizes: Sizes, entry: Eviction) -> Captured:
    """Return the region of ``graph`` with a plan that serves ``sizes``, those of a call.

    It is made for larger ones if these fit, see `CapturedGraph.sizes_to_plan_for`.
    """
    *larger, last = graph.sizes_to_plan_for(sizes)
    graph = graph.for_sizes(sizes, graph.index, entry)  # a copy: planning may evict the graph itself
    for planned in larger:
        with suppress(PlanInfeasible, SizesOutgrown):
            return _plan_for(graph, planned, sizes, entry)
    return _plan_for(graph, last, sizes, entry)


def _plan_for(graph: CapturedGraph, planned: Sizes, sizes: Sizes, entry: Eviction) -> Captured:
    session = graph.session
    session.make_room_to_trace()
    session.traces.begin()
    other = graph.for_sizes(planned, len(session.graphs), entry)
    session.graphs.append(other)
    session.losses.expect_as(other.index, graph.index)
    session.mark_prepared()
    try:
        with without_hooks(), reported(f"{session.name}, other sizes", "planning"):
            other.capture_again()
        if planned != sizes and session.plans[other.follows].excess_bytes > 0:
            raise SizesOutgrown
        other.fit(sizes)
    except BaseException:
        session.discard(other)
        raise
    _log.info("%s: planned graph %d for %s", session.name, other.index, dict(planned))
    return _GraphCall(session, other)


class _GraphCall:
    """Runs one graph; Dynamo may hold it for longer than its session, see `CapturedGraph.release`."""

    def __init__(self, session: Session, graph: CapturedGraph) -> None:
        self._session: Any = weakref.proxy(session)
        self._graph, self._own = graph, session.recorder.own
        # A `ModelCall` runs the graphs, or torch.compile.
        self._begin = self._own.begin_graph if session.has_hooks else self._own.begin_call

    @property
    def unmoved_bytes(self) -> int:
        """See `Captured`."""
        return self._graph.unmoved_bytes

    def __call__(self, *arguments: Any, sizes: Sizes | None = None) -> Any:
        """See `Captured`."""
        session, graph = self._session, self._graph
        self._begin()
        session.check_caller()
        graph.fit(sizes)
        with without_hooks():
            session.prepare(graph)
            graph.fit(sizes)  # the step may have another plan now
            graph.begin_run(sizes)
            with stage("running"):
                outputs = graph.graph_for_this_run().function(*arguments)
        self._own.seconds += perf_counter()
        return outputs

    def for_sizes(self, sizes: Sizes, entry: Eviction) -> Captured:
        """See `Captured`."""
        return _capture_for_sizes(self._graph, sizes, entry)


def _is_of_capture(error: BaseException) -> bool:
    """Whether ``error`` means that a graph cannot be captured; then the code that it was captured from can run."""
    if not isinstance(error, Exception) or isinstance(error, RestartAnalysis):  # torch traces again, with constants
        return False
    return (isinstance(error, CaptureError) or not isinstance(error, LmswapError)) and interrupt_in(error) is None
