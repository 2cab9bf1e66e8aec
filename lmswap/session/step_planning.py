"""Plans the steps of a model: a graph by itself as it is captured, and the graphs that ran in one step as one.

While no plan fits, traces that were not used lately are evicted, and then state of the optimizer streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmswap.capture.lower import Lowered
from lmswap.capture.merge_programs import MergedPrograms, merge, merge_costs
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.collection_pause import collection_paused
from lmswap.errors import BudgetExceeded, PlanInfeasible
from lmswap.hardware.cache import remembers
from lmswap.hardware.cublas_workspace import allocate_cublas_workspaces
from lmswap.ir.costs import OpCosts
from lmswap.planner.cache import CachedPlan
from lmswap.progress import stage
from lmswap.session.compiled_graph import CapturedGraph, Graphs, planned_graph
from lmswap.session.context import ModelContext
from lmswap.session.diagnostics import crowded_out, warn
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import PlannedStep
from lmswap.session.state_streaming import StateStreaming
from lmswap.session.traces import Traces


class StepPlanning:
    """Plans one model's graphs, and activates their plans."""

    def __init__(
        self,
        context: ModelContext,
        plans: StepPlans,
        traces: Traces,
        streaming: StateStreaming,
        profiler: OpProfiler,
        *,
        graphs: Graphs,
    ) -> None:
        """``graphs`` are the model's, ``profiler`` times their ops."""
        self._context, self._plans, self._traces = context, plans, traces
        self._streaming, self._profiler, self._graphs = streaming, profiler, graphs
        self.refusal: PlanInfeasible | None = None  # of a step that has not run since

    def plan_captured(self, graph: CapturedGraph, lowered: Lowered) -> None:
        """Plan a graph that was just captured, by itself, with the memory that is free now.

        Raises:
            PlanInfeasible: no plan fits the budget, and no graph has run yet.
        """
        context, recorder = self._context, self._context.engine.recorder
        merged = self._streaming.with_streamed(merge([lowered.program]))
        known = self._plans.load_cached(merged.program)
        if known:
            graph.costs = known.costs
            context.budget.expect_first_runs(known.costs.first_run_bytes, recorder.num_steps + 1)
        else:
            with stage("timing ops", is_remembered=remembers()):
                known_seconds = graph.seconds_of_other_sizes(lowered.program)
                graph.costs = self._profiler.costs(lowered.program, lowered.graphs, known_seconds)
        if any("mm" in op.target for op in lowered.program.ops):  # mm, addmm, bmm, baddbmm
            allocate_cublas_workspaces(context.engine.device)
        ran = [index for index, phase in recorder.current_sequence if phase == "forward"]
        try:
            with stage("planning", is_remembered=remembers() and known is None):
                self._make((graph.index,), merged, graph.costs, known)
        except PlanInfeasible as refusal:
            if not ran and not recorder.num_steps:
                raise
            # Earlier graphs of this step were planned before this one was known; from the next step on all of them
            # share one plan, which fits or is refused with the reason.
            step = self._plans.make_least((graph.index,), self._streaming.with_streamed(merged), graph.costs, refusal)
            # A complete step is over, though it was not ended yet.
            after = ran[-1] if ran and recorder.complete() is None else None
            context.plan_notes.append(crowded_out(graph.index, after))
            if after is None and step.is_over_budget:
                warn(f"{context.name}: {refusal.summary}. It runs by the plan that takes the least", BudgetExceeded)

    def plan(self, indices: tuple[int, ...], backwards: Sequence[int] | None = None) -> None:
        """Plan the graphs of these ``indices`` as one step; see `merge` for ``backwards``.

        Raises:
            PlanInfeasible: no plan fits the budget.
            PlanMismatch: the plan file does not have the step, or its plan does not fit.
            TierError: no plan fits the tier, or the tier has no room.
        """
        graphs = [planned_graph(self._graphs, index) for index in indices]
        for graph in graphs:
            if isinstance(graph, CapturedGraph):
                graph.sizes.plan_for_own()
        merged = self._streaming.with_streamed(merge([graph.program for graph in graphs], backwards))
        costs = merge_costs(merged, [graph.costs for graph in graphs])
        self._make(indices, merged, costs, self._plans.load_cached(merged.program))

    @collection_paused()
    def _make(
        self, indices: tuple[int, ...], merged: MergedPrograms, costs: OpCosts, known: CachedPlan | None
    ) -> PlannedStep:
        """Make and activate a plan, see `StepPlans.make`; while none fits, evict traces that were not used lately.

        Optimizer state streams where no plan fits otherwise, or the step is faster so.
        """
        is_split = False  # of all splits, the best
        while True:
            try:
                is_growth_known = self._is_growth_known(indices)
                step = self._plans.make(indices, merged, costs, known, is_growth_known=is_growth_known)
            except PlanInfeasible as refusal:
                if not self._traces.evict_half():
                    is_split = self._streaming.stream_more(merged.program, costs)
                    if not is_split:
                        refusal = self._streaming.refusal_if_streamed(refusal, merged.program, costs)
                        self.refusal = refusal.but()  # which holds no frames
                        raise refusal from None
            else:
                if is_split or not step.moves or not self._streaming.stream_more(merged.program, step.costs, step):
                    return step
                is_split = True
            if (streamed := self._streaming.with_streamed(merged)) != merged:
                merged, known = streamed, self._plans.load_cached(streamed.program)

    def _is_growth_known(self, indices: tuple[int, ...]) -> bool:
        """Whether what the process grows by in first steps is in use: other sizes ran with moves by the same traces."""
        graphs, traces = [planned_graph(self._graphs, index) for index in indices], self._traces_of(indices)
        if not all(isinstance(graph, CapturedGraph) and graph.sizes.vary for graph in graphs):
            return False
        return self._plans.newest(lambda step: step.moves and traces <= self._traces_of(step.graphs)) is not None

    def _traces_of(self, indices: tuple[int, ...]) -> set[object]:
        graphs = (planned_graph(self._graphs, index) for index in indices)
        return {graph.trace for graph in graphs if isinstance(graph, CapturedGraph)}
