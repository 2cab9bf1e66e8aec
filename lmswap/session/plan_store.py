"""The plans of a model's steps: cached, new, of a plan file, of another rank, or replanned."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version

import torch

from lmswap.capture.caller_memory import without_losses
from lmswap.capture.merge_programs import MergedPrograms
from lmswap.errors import PlanInfeasible, PlanMismatch
from lmswap.ir.backward_parts import part_bytes
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import Program
from lmswap.planner import simulate
from lmswap.planner.cache import CachedPlan, PlanCache
from lmswap.planner.memory.pack_arena import common_arena_bytes
from lmswap.planner.memory.pack_tier import host_copy_bytes
from lmswap.reporting.text import format_seconds
from lmswap.runtime.step_record import SegmentKey
from lmswap.session.allowance import GROWTH_BYTES, Allowance
from lmswap.session.context import ModelContext
from lmswap.session.plan_request import PlanRequest
from lmswap.session.planned_step import FROM_CACHE, FROM_OTHER_RANK, NO_HISTORY, History, PlannedStep
from lmswap.session.planner import Planner
from lmswap.session.retention import Retention

_log = logging.getLogger(__name__)


class StepPlans:
    """The active plans of a model's steps, by the graphs of a step in forward order."""

    def __init__(self, context: ModelContext, planner: Planner) -> None:
        """Tensors get offsets in the arena of the engine, if it has one.

        Pinned plans are followed, without planning. Else the first plan of a step, and the replanned one after its
        first runs, are those of the first local rank that comes to it.
        """
        self._options = options = context.options
        self._planner, self._engine, self._memory = planner, context.engine, context.memory
        self._budget, self._retention, self._machine = context.budget, context.retention, context.machine
        self._pinned, self._node = context.pinned, context.node
        self._weights = context.weights
        self._steps: dict[tuple[int, ...], PlannedStep] = {}  # in the order in which their plans were activated
        self._kind = {
            "lmswap": version("lmswap"),
            "torch": torch.__version__,
            "policy": options.policy,
            "compiler": options.compiler,
            "budget": options.budget_bytes if options.budget_share is None else options.budget_share,
            "emulated": asdict(options.link.unshared) if options.link else None,
            "is_shared": options.link is not None and options.link.shared_file is not None,
        }

    def __getitem__(self, graphs: tuple[int, ...]) -> PlannedStep:
        return self._steps[graphs]

    @property
    def _cache(self) -> PlanCache:
        """The cached plans for what is known of the machine now: a plan by assumed rates serves no measured machine."""
        return PlanCache(self._machine.now, self._kind, **self._options.swap_limits)

    def get(self, graphs: tuple[int, ...]) -> PlannedStep | None:
        """Return the step of these graphs, if it is planned."""
        return self._steps.get(graphs)

    def newest(self, among: Callable[[PlannedStep], bool] = lambda _: True) -> PlannedStep | None:
        """Return the step that was planned last, of those that ``among`` accepts."""
        return next(filter(among, reversed(self._steps.values())), None)

    def describe(self, number: int, ran: Collection[int]) -> tuple[str, str]:
        """Return the name of the buffer ``number`` in a step that ran graphs ``ran``, and the op that makes it."""
        step = self.newest(lambda step: {*ran} <= {*step.graphs})
        if step is None:
            return str(number), "a step without a plan"
        program = step.merged.program
        op = next((op for op in program.ops if number in op.writes), None)
        made_by = f"op '{op.name}' ({', '.join(filter(None, (op.target, op.source)))})" if op else "the model's caller"
        return program.buffer_names[number], made_by

    def load_cached(self, program: Program) -> CachedPlan | None:
        """Return the cached plan of an earlier process for ``program``, or that of the plan file.

        Raises:
            PlanMismatch: the plan file does not have it.
        """
        return self._cache.read(program) if self._pinned is None else self._pinned.find(program)

    def active(self) -> tuple[tuple[Program, CachedPlan], ...]:
        """Return all planned steps, priced and certified by the current costs."""
        return tuple((step.merged.program, self._planner.priced(step)) for step in self._steps.values())

    def make(
        self,
        graphs: tuple[int, ...],
        merged: MergedPrograms,
        costs: OpCosts,
        known: CachedPlan | None = None,
        *,
        is_growth_known: bool = False,
    ) -> PlannedStep:
        """Activate a plan: the ``known`` one if it still fits, else a new one by its costs, or by ``costs``.

        ``is_growth_known``: its first steps need no more of a margin than those of steps that move nothing.

        Raises:
            PlanInfeasible: no plan fits the budget.
            PlanMismatch: the plan of the plan file does not fit.
        """
        program = merged.program
        costs = self._planner.with_losses(known.costs if known is not None else costs, program, graphs)
        allowance = self._allowance(program, costs, is_growth_known=is_growth_known)
        if known is not None and self._pinned is not None:
            allowance = allowance.sparing(min(known.room.spared_reserve_bytes, allowance.reserve_bytes))
            self._refuse_outgrown(known, program, allowance)
            return self.adopt(graphs, merged, known, allowance, f"that of '{self._options.plan}'")
        if known is not None and self._still_serves(known, program, allowance):
            return self.adopt(graphs, merged, known, allowance, FROM_CACHE)
        machine = known.machine if known is not None else self._machine.now
        request, started = self._planner.request(program, costs, machine, allowance), time.perf_counter()
        met, planned = (self._plan_together if known is None else self._planner.search_within_budget)(graphs, request)
        origin = f"made in {format_seconds(time.perf_counter() - started)}"
        self.remember(program, planned)
        if met is None:
            return self.adopt(graphs, merged, planned, allowance, FROM_OTHER_RANK)
        return self.adopt(graphs, merged, planned, met.allowance, origin, retention=met.retention)

    def make_least(
        self, graphs: tuple[int, ...], merged: MergedPrograms, costs: OpCosts, refusal: PlanInfeasible
    ) -> PlannedStep:
        """Activate the plan that takes the least, for a step that no plan fits.

        Raises:
            PlanInfeasible: ``refusal``; the tier has no room for that plan.
        """
        allowance = self._allowance(merged.program, costs)
        request = self._planner.request(merged.program, costs, self._machine.now, allowance)
        if (found := self._planner.search_least(request, refusal)) is None:
            raise refusal
        met, planned = found
        return self.adopt(graphs, merged, planned, allowance, "takes the least", retention=met.retention)

    def _allowance(self, program: Program, costs: OpCosts, *, is_growth_known: bool = False) -> Allowance:
        """Return what a step of ``program`` may occupy now; a budget that is a share is set by it."""
        self._memory.trim()  # timing the ops leaves pages for reuse, which do not stay in use
        allowance = self._budget.allowance(program)
        if is_growth_known:
            allowance = replace(allowance, settled_margin_bytes=self._budget.unmoved_margin_bytes(program))
        return self._budget.take_share(program, costs, allowance)

    def adopt(
        self,
        graphs: tuple[int, ...],
        merged: MergedPrograms,
        planned: CachedPlan,
        allowance: Allowance,
        origin: str,
        *,
        retention: Retention | None = None,
        history: History = NO_HISTORY,
    ) -> PlannedStep:
        """Activate ``planned`` for the step of ``graphs``, and assume the retention that it relies on.

        Args:
            graphs: of the step.
            merged: its program.
            planned: its plan, of any origin.
            allowance: what the step may occupy.
            origin: of the plan, for reports.
            retention: what the plan was searched for; else the most with which the allowance suffices.
            history: of runs by an earlier plan of the step.

        Raises:
            TierError: the tier has no room for it.
        """
        plan, costs, machine = planned.plan, planned.costs, planned.machine
        for tier, nbytes in plan.tier_bytes.items():
            self._reserve(tier, nbytes - host_copy_bytes(merged.program, plan))
        choices = self._retention.choices if retention is None else (retention,)
        max_bytes = allowance.step_bytes + allowance.slack_bytes
        places, retention = self._planner.first_layout(merged.program, costs, plan, choices, max_bytes)
        self._retention.assume(retention)
        self._steps.pop(graphs, None)  # to be the last, see `newest`
        step = self._steps[graphs] = PlannedStep(
            plan,
            costs,
            machine,
            planned.room,
            graphs,
            merged,
            allowance,
            allowance,
            origin,
            places=places,
            history=history,
        )
        self.place_weights(step, self._engine.recorder.current_sequence)
        if self._engine.arena is not None:
            placed = ((known.places, known.allowance.step_bytes) for known in self._steps.values() if known.places)
            self._engine.arena.resize(common_arena_bytes(placed, GROWTH_BYTES))
        _log.info(
            "planned the step of graphs %s, %s: %d of %d buffers swapped, %d ops recomputed, peak %s of a budget of %s "
            "(%s)",
            ", ".join(map(str, graphs)),
            origin,
            len({swap.buffer for swap in plan.swaps}),
            len(merged.program.buffers),
            len(plan.recomputes),
            format_bytes(plan.predicted_peak_bytes + allowance.base_bytes + allowance.reserve_bytes),
            format_bytes(allowance.budget_bytes),
            allowance.account.counted,
        )
        return step

    def place_weights(self, step: PlannedStep, ran: Sequence[SegmentKey] = ()) -> None:
        """Make resident the weights that ``step`` keeps, and those that the graphs which ``ran`` in it so far keep.

        Raises:
            TierError: the tier has no room for the others.
            TransferError: a copy failed.
        """
        under_way = (self._steps.get((graph,)) for graph in dict.fromkeys(graph for graph, _ in ran))
        steps = [step, *(each for each in under_way if each is not None and each is not step)]
        if self._weights.place([(each.merged.program, each.plan) for each in steps]):
            self._memory.trim()

    def tier_bytes(self, tier: str) -> int:
        """Return what the plans need of ``tier``: their steps run one after the other, so that of the largest."""
        return max((step.plan.tier_bytes.get(tier, 0) for step in self._steps.values()), default=0)

    def keep_overdrawn(self, step: PlannedStep) -> None:
        """Keep the plan of ``step``, which may exceed its allowance by its current costs: no other was found."""
        costs = step.allowance.room.with_streams(step.merged.program, step.costs)
        peak_bytes = simulate(step.merged.program, costs, step.machine, step.plan).peak_bytes
        kept = replace(step, plan=replace(step.plan, predicted_peak_bytes=peak_bytes))
        self.store(replace(kept, is_overdrawn=kept.excess_bytes > step.allowance.slack_bytes))

    def store(self, step: PlannedStep) -> None:
        """Store new facts on a step whose plan stays."""
        self._steps[step.graphs] = step

    def drop(self, is_over: Callable[[tuple[int, ...]], bool]) -> None:
        """Remove the plans of all steps whose graphs satisfy ``is_over``."""
        self._steps = {graphs: step for graphs, step in self._steps.items() if not is_over(graphs)}

    def accumulated_bytes(self, step: PlannedStep) -> int:
        """Return what gradients hold outside of ``step`` if each is accumulated as it is computed."""
        return part_bytes(step.merged.program.gradient_bytes)

    def described(self, step: PlannedStep) -> Program:
        """Return the program of ``step`` with the memory outside of it that its budget counts in a new process."""
        program = step.merged.program
        allowance = self._budget.moving(step.allowance.at_start(), program)
        unmoved_margin_bytes = self._budget.unmoved(allowance, program).margin_bytes
        costs = allowance.room.with_streams(program, step.costs)
        fixed = replace(allowance.account, unmoved_margin_bytes=unmoved_margin_bytes)
        return replace(program, fixed=fixed, scratch_bytes=costs.scratch_bytes)

    def remember(self, program: Program, planned: CachedPlan) -> None:
        """Write a plan to the cache, for the next process that runs ``program``."""
        self._cache.write(program, planned)

    def load_cached_replan(self, step: PlannedStep) -> CachedPlan | None:
        """Return the cached plan of an earlier process for ``step`` in its current state, if it fits."""
        if self._pinned is not None:
            return None
        known = self._cache.read(step.merged.program, spares=step.allowance.spared_bytes > 0)
        serves = known is not None and self._still_serves(known, step.merged.program, step.allowance)
        return known if serves else None

    def _still_serves(self, known: CachedPlan, program: Program, allowance: Allowance) -> bool:
        if not known.fits(allowance.step_bytes, allowance.slack_bytes):
            return False
        max_bytes, choices = allowance.step_bytes + allowance.slack_bytes, self._retention.choices
        costs = allowance.room.with_streams(program, known.costs)
        planned_costs = known.room.with_streams(program, known.costs)
        if costs != planned_costs and simulate(program, costs, known.machine, known.plan).peak_bytes > max_bytes:
            return False
        places, _ = self._planner.first_layout(program, known.costs, known.plan, choices, max_bytes)
        return places is None or places.total_bytes <= max_bytes

    def _refuse_outgrown(self, pinned: CachedPlan, program: Program, allowance: Allowance) -> None:
        """Raise PlanMismatch if the plan exceeds the budget even without its margin, which start-up memory may use."""
        plan = pinned.plan
        if plan.budget_bytes > allowance.budget_bytes:
            return  # of a graph whose step was not known yet, or a plan that was kept though it exceeds the budget
        # Assumed memory of a loss is no reason for refusal, as for a budget.
        costs = allowance.room.with_streams(program, without_losses(pinned.costs, program))
        lean = simulate(program, costs, pinned.machine, plan)
        before_bytes = allowance.base_bytes + allowance.reserve_bytes
        max_bytes, choices = allowance.budget_bytes - before_bytes, self._retention.choices
        places, _ = self._planner.first_layout(program, pinned.costs, plan, choices, max_bytes)
        step_bytes = max(lean.peak_bytes, places.total_bytes if places is not None else 0)
        if before_bytes + step_bytes > allowance.budget_bytes:
            raise PlanMismatch(
                f"plan '{self._options.plan}' takes {format_bytes(step_bytes)} for the step's tensors, and "
                f"{format_bytes(before_bytes)} are in use before the step and reserved: more than the budget of "
                f"{format_bytes(allowance.budget_bytes)} ({allowance.account.counted})"
            )

    def _plan_together(self, graphs: tuple[int, ...], request: PlanRequest) -> tuple[PlanRequest | None, CachedPlan]:
        """Search the first plan of a step, or take that of the first rank of this machine that did; then no request.

        A rank waits only for a plan that is in progress: the steps that other ranks will reach are not known.
        """
        own: list[tuple[PlanRequest, CachedPlan]] = []

        def compute() -> bytes:
            own.append(self._planner.search_within_budget(graphs, request))
            return self._cache.pack(own[0][1])

        if self._node is not None:
            packed = self._node.compute_once(self._cache.name(request.program), compute)
            planned = None if own else self._unpack_fitting(packed, request.program, request.allowance)
            if planned is not None:
                return None, planned
        return own[0] if own else self._planner.search_within_budget(graphs, request)

    def is_owned_by_other_rank(self, program: Program) -> bool:
        """Whether another rank of this machine replans ``program`` by measured steps; if none does, this one will."""
        return self._node is not None and not self._node.claim(self._name_again(program))

    def publish_replan(self, program: Program, planned: CachedPlan) -> None:
        """Publish to the other ranks the plan that this one, as the first, replanned."""
        if self._node is not None:
            self._node.publish(self._name_again(program), self._cache.pack(planned))

    def fetch_replan(self, program: Program, allowance: Allowance) -> CachedPlan | None:
        """Return what a rank of this machine has replanned by now, if that fits here."""
        packed = self._node.fetch(self._name_again(program)) if self._node is not None else None
        return self._unpack_fitting(packed, program, allowance)

    def _name_again(self, program: Program) -> str:
        return f"{self._cache.name(program)}-again"

    def _unpack_fitting(self, packed: bytes | None, program: Program, allowance: Allowance) -> CachedPlan | None:
        """Return the plan that another rank published, if it fits here, too."""
        planned = self._cache.unpack(program, packed) if packed else None
        return planned if planned is not None and self._still_serves(planned, program, allowance) else None

    def _reserve(self, tier: str, nbytes: int) -> None:
        """Reserve the tier for a plan before its step runs: pinning some GiB takes a second."""
        before = self._engine.native.tier_stats(tier)
        self._engine.native.reserve(tier, nbytes)
        after = self._engine.native.tier_stats(tier)
        if after.reserve_seconds > before.reserve_seconds:
            _log.info(
                "reserved the %s tier in %s: %s, before %s",
                tier,
                format_seconds(after.reserve_seconds - before.reserve_seconds),
                format_bytes(after.capacity_bytes),
                format_bytes(before.capacity_bytes),
            )
