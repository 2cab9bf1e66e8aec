"""What is planned? The steps of a model that follow a plan: a remembered one, a new one, one that was made again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from importlib.metadata import version

import torch

from lmswap.analyze.memory import StepMemory
from lmswap.capture.join import Joined
from lmswap.capture.loss import without_losses
from lmswap.errors import PlanInfeasible, PlanMismatch, TierError
from lmswap.execute.engine import SwapEngine
from lmswap.execute.parts import part_bytes
from lmswap.hardware.local_ranks import LocalRanks
from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.machine import Machine
from lmswap.ir.program import BufferKind, Program
from lmswap.options import Options
from lmswap.plan import reprice, simulate
from lmswap.plan.cache import CachedPlan, PlanCache
from lmswap.plan.pack_arena import common_arena_bytes
from lmswap.reporting.text import format_seconds
from lmswap.session.allowance import GROWTH_BYTES, Allowance, Budget
from lmswap.session.pinned import PinnedPlans
from lmswap.session.planned import PlannedStep
from lmswap.session.planner import Planner

_log = logging.getLogger(__name__)

# Origins of plans.
FROM_CACHE, FROM_OTHER_RANK = "from cache", "made by another rank of this machine"
_NO_BUDGET_BYTES = 2**62


class StepPlans:
    """The plans that a model's steps follow, by the graphs that run in a step, in forward order."""

    def __init__(
        self,
        options: Options,
        machine: Machine,
        tier: str,
        *,
        planner: Planner,
        engine: SwapEngine,
        memory: DeviceMemory,
        budget: Budget,
        pinned: PinnedPlans | None,
        node: LocalRanks | None,
    ) -> None:
        """Tensors get places in the arena of ``engine``, if it has one.

        With ``pinned`` plans these are followed, and no others are made. Else the first plan of a step, and the one
        that is made again after its first runs, are those of the first rank of ``node`` that comes to it.
        """
        self._options, self._machine, self._tier = options, machine, tier
        self._planner, self._engine, self._memory, self._budget = planner, engine, memory, budget
        self._pinned, self._node = pinned, node
        self._steps: dict[tuple[int, ...], PlannedStep] = {}
        self._cache = PlanCache(
            machine,
            {
                "lmswap": version("lmswap"),
                "torch": torch.__version__,
                "policy": options.policy,
                "compiler": options.compiler,
                "budget": options.budget_bytes if options.budget_share is None else options.budget_share,
                "emulated": asdict(options.link.unshared) if options.link else None,
                "is_shared": options.link is not None and options.link.shared_file is not None,
            },
            tier=tier,
            min_swap_bytes=options.min_swap_bytes,
        )

    def __getitem__(self, graphs: tuple[int, ...]) -> PlannedStep:
        return self._steps[graphs]

    def get(self, graphs: tuple[int, ...]) -> PlannedStep | None:
        """The step of these graphs, if it is planned."""
        return self._steps.get(graphs)

    def newest(self, among: Callable[[PlannedStep], bool] = lambda _: True) -> PlannedStep | None:
        """The step that was planned last, ``among`` some or all of them."""
        return next(filter(among, reversed(self._steps.values())), None)

    def describe(self, number: int, ran: Collection[int]) -> tuple[str, str]:
        """What people call the buffer that is moved under ``number`` where graphs ``ran``, and the op that makes it."""
        step = self.newest(lambda step: {*ran} <= {*step.graphs})
        if step is None:
            return str(number), "a step without a plan"
        program = step.joined.program
        op = next((op for op in program.ops if number in op.writes), None)
        made_by = f"op '{op.name}' ({', '.join(filter(None, (op.target, op.source)))})" if op else "the model's caller"
        return program.buffer_names[number], made_by

    def remembered(self, program: Program) -> CachedPlan | None:
        """What an earlier process planned for ``program``.

        Raises:
            PlanMismatch: it is not in the file that is to be followed.
        """
        return self._cache.read(program) if self._pinned is None else self._pinned.find(program)

    def in_force(self) -> tuple[tuple[Program, CachedPlan], ...]:
        """The steps that are planned, priced and certified by what is known now."""
        return tuple((step.joined.program, self.priced(step)) for step in self._steps.values())

    def make(
        self, graphs: tuple[int, ...], joined: Joined, costs: OpCosts, known: CachedPlan | None = None
    ) -> PlannedStep:
        """Puts a plan in force: the ``known`` one if it still serves, else a new one from what is known, or ``costs``.

        Raises:
            PlanInfeasible: no plan fits the budget.
            PlanMismatch: the pinned plan does not.
        """
        allowance = self._budget.allowance(joined.program, known.costs if known is not None else costs)
        if known is not None and self._pinned is not None:
            allowance = allowance.sparing(min(known.room.spared_bytes, allowance.reserve_bytes))
            self._refuse_outgrown(known, joined.program, allowance)
            return self.adopt(graphs, joined, known, allowance, f"that of '{self._options.plan}'")
        if known is not None and self._still_serves(known, joined.program, allowance):
            return self.adopt(graphs, joined, known, allowance, FROM_CACHE)
        costs, machine = (known.costs, known.machine) if known else (costs, self._machine)
        costs = self._planner.with_losses(costs, joined.program, graphs)

        def plan() -> CachedPlan:
            nonlocal allowance
            while True:
                try:
                    return self._planner.first(graphs, joined.program, costs, machine, allowance)
                except PlanInfeasible as error:
                    # With its frames it would keep what callers hold, as both would keep each other.
                    refusal, unmoved = error.with_traceback(None), self._budget.unmoved(allowance, joined.program)
                if allowance != unmoved:
                    refusal = self._least(refusal, joined.program, costs, unmoved)
                    if refusal.needed_bytes <= allowance.budget_bytes:
                        allowance = unmoved
                        continue
                wider = self._budget.widened(allowance, refusal.needed_bytes)
                if wider is None:
                    raise self._advised(refusal, joined.program, costs, machine, allowance)
                allowance = wider

        started = time.perf_counter()
        planned, is_own = self._plan_together(joined.program, allowance, plan) if known is None else (plan(), True)
        seconds = time.perf_counter() - started
        self.remember(joined.program, planned)
        origin = f"made in {format_seconds(seconds)}" if is_own else FROM_OTHER_RANK
        return self.adopt(graphs, joined, planned, allowance, origin)

    def swap_all(self, graphs: tuple[int, ...], joined: Joined, costs: OpCosts) -> PlannedStep:
        """Puts a plan in force that swaps all it can, for a step that no plan fits."""
        allowance, machine = self._budget.allowance(joined.program, costs), self._machine
        plan = self._planner.search(
            joined.program, costs, machine, allowance, policy="swap_all", budget_bytes=_NO_BUDGET_BYTES
        )
        planned = CachedPlan(plan, costs, machine, allowance.room)
        return self.adopt(graphs, joined, planned, allowance, "swaps whatever it can")

    def adopt(
        self, graphs: tuple[int, ...], joined: Joined, planned: CachedPlan, allowance: Allowance, origin: str
    ) -> PlannedStep:
        """Puts ``planned`` in force for the step of ``graphs``.

        Raises:
            TierError: the tier has no room for it.
        """
        plan, costs, machine = planned.plan, planned.costs, planned.machine
        for tier, nbytes in plan.tier_bytes.items():
            self._reserve(tier, nbytes)
        predicted = simulate(joined.program, costs, machine, plan)
        places = self._planner.fit_places(joined.program, costs, plan, allowance.step_bytes + GROWTH_BYTES)
        step = self._steps[graphs] = PlannedStep(
            plan, costs, machine, planned.room, graphs, joined, predicted, allowance, allowance, origin, places=places
        )
        if self._engine.arena is not None:
            placed = ((known.places, known.allowance.step_bytes) for known in self._steps.values() if known.places)
            self._engine.arena.resize(common_arena_bytes(placed, GROWTH_BYTES))
        _log.info(
            "planned the step of graphs %s, %s: %d of %d buffers swapped, %d ops run again, peak %s of a budget of %s",
            ", ".join(map(str, graphs)),
            origin,
            len({swap.buffer for swap in plan.swaps}),
            len(joined.program.buffers),
            len(plan.recomputes),
            format_bytes(plan.predicted_peak_bytes + allowance.base_bytes + allowance.reserve_bytes),
            format_bytes(allowance.budget_bytes),
        )
        return step

    def predict(self, step: PlannedStep) -> PlannedStep:
        """``step`` with its timeline, which leaves out what is read as in use between steps."""
        predicted = simulate(
            step.joined.program,
            step.costs,
            step.machine,
            step.plan,
            counted_from_bytes=self._memory.counted_from_bytes(),
            released=step.released,
        )
        found = self._steps[step.graphs] = replace(step, predicted=predicted)
        return found

    def keep(self, step: PlannedStep) -> None:
        """Keeps the plan of ``step``, though it may take too much by its costs and allowance: no other was found."""
        peak_bytes = simulate(step.joined.program, step.costs, step.machine, step.plan).peak_bytes
        kept = self.predict(replace(step, plan=replace(step.plan, predicted_peak_bytes=peak_bytes)))
        self.put(replace(kept, is_overdrawn=kept.excess_bytes > GROWTH_BYTES))

    def put(self, step: PlannedStep) -> None:
        """Keeps what is known of a step now, whose plan stays."""
        self._steps[step.graphs] = step

    def drop(self, is_over: Callable[[tuple[int, ...]], bool]) -> None:
        """Forget the plans of steps whose graphs ``is_over`` says are gone."""
        self._steps = {graphs: step for graphs, step in self._steps.items() if not is_over(graphs)}

    def add_up(self, step: PlannedStep) -> PlannedStep:
        """``step`` by its plan, with gradients handed over as they are made, and added to those of the steps before."""
        program = step.joined.program.with_gradients(BufferKind.ACCUMULATED_GRADIENT)
        part = part_bytes(program.bytes_of(BufferKind.ACCUMULATED_GRADIENT))
        allowance = step.allowance.with_held(part + max(0, self._budget.outgrown_bytes(step.allowance)))
        adding = self.adopt(step.graphs, replace(step.joined, program=program), step, allowance, step.origin)
        self.put(replace(adding, segment_seconds=step.segment_seconds, released=step.released))
        return self._steps[step.graphs]

    def priced(self, step: PlannedStep) -> PlannedStep:
        """``step`` with its plan priced and certified by the costs that are known now."""
        program, min_swap_bytes = step.joined.program, self._options.min_swap_bytes
        plan = reprice(step.plan, program, step.costs, step.machine, tier=self._tier, min_swap_bytes=min_swap_bytes)
        return replace(step, plan=plan)

    def least_bytes(self, step: PlannedStep) -> int:
        """The least budget found for ``step``, by the model's policy; one that is a little less may do, too.

        It is for a process that begins with it, whose first steps leave no less free than those of this one.
        """
        allowance, program = step.allowance.at_start(), step.joined.program
        try:
            self._planner.search(program, step.costs, step.machine, allowance, budget_bytes=1)
        except PlanInfeasible as error:
            unmoved = self._budget.unmoved(allowance, program)
            return self._least(error, program, step.costs, unmoved).needed_bytes
        return allowance.fixed_bytes

    def _advised(
        self, refusal: PlanInfeasible, program: Program, costs: OpCosts, machine: Machine, allowance: Allowance
    ) -> PlanInfeasible:
        """``refusal`` in the words that the budget was given in, with another policy where one would do."""
        if (shares := self._budget.shares(refusal.needed_bytes, allowance)) is not None:
            free = format_bytes(self._budget.most_bytes)
            return refusal.but(shares=shares, instead=f"of which the device has {free} to spare")
        if self._options.policy == "auto":
            return refusal
        try:
            self._planner.search(program, costs, machine, allowance, policy="auto")
        except (PlanInfeasible, TierError):
            return refusal
        return refusal.but(instead="policy='auto', which fits")

    @staticmethod
    def _least(refusal: PlanInfeasible, program: Program, costs: OpCosts, unmoved: Allowance) -> PlanInfeasible:
        """``refusal``, or that of a step that swaps and recomputes nothing where this needs less, by its allowance."""
        peak = StepMemory(program, costs).peak
        needed_bytes = unmoved.fixed_bytes + peak.nbytes
        if needed_bytes >= refusal.needed_bytes:
            return refusal
        return refusal.but(
            needed_bytes=needed_bytes,
            where=f"op {peak.op} {program.ops[peak.op].title}",
            live=peak.live,
            parts=(*unmoved.parts, ("for the step's tensors", peak.nbytes)),
        )

    def described(self, step: PlannedStep) -> Program:
        """The program of ``step`` with what else its budget counts in a process that begins with it."""
        program, allowance = step.joined.program, step.allowance.at_start()
        fixed = FixedMemory(
            allowance.base_bytes,
            allowance.reserve_bytes,
            allowance.margin_bytes,
            self._budget.unmoved(allowance, program).margin_bytes,
        )
        return replace(program, fixed=fixed, scratch_bytes=step.costs.scratch_bytes)

    def remember(self, program: Program, planned: CachedPlan) -> None:
        """For the next process that runs ``program``."""
        self._cache.write(program, planned)

    def remembered_again(self, step: PlannedStep) -> CachedPlan | None:
        """What an earlier process planned for ``step`` when it had shown as much as it has now."""
        if self._pinned is not None:
            return None
        known = self._cache.read(step.joined.program, spares=step.allowance.spared_bytes > 0)
        serves = known is not None and self._still_serves(known, step.joined.program, step.allowance)
        return known if serves else None

    def _still_serves(self, known: CachedPlan, program: Program, allowance: Allowance) -> bool:
        most_bytes = allowance.step_bytes + GROWTH_BYTES
        places = self._planner.fit_places(program, known.costs, known.plan, most_bytes)
        fits = places is None or places.total_bytes <= most_bytes
        return known.fits(allowance.step_bytes, GROWTH_BYTES) and fits

    def _refuse_outgrown(self, pinned: CachedPlan, program: Program, allowance: Allowance) -> None:
        """A pinned plan may use the margin, as what is in use before a step differs from start to start."""
        plan = pinned.plan
        if plan.budget_bytes > allowance.budget_bytes:
            return  # of a graph that is served until all graphs of its step are known, or more than fits was kept
        # What a loss may take is no reason to refuse it, as none to refuse a budget.
        lean = simulate(program, without_losses(pinned.costs, program), pinned.machine, plan)
        before_bytes = allowance.base_bytes + allowance.reserve_bytes
        places = self._planner.fit_places(program, pinned.costs, plan, allowance.budget_bytes - before_bytes)
        step_bytes = max(lean.peak_bytes, places.total_bytes if places is not None else 0)
        if before_bytes + step_bytes > allowance.budget_bytes:
            raise PlanMismatch(
                f"plan '{self._options.plan}' takes {format_bytes(step_bytes)} for the step's tensors, and "
                f"{format_bytes(before_bytes)} are in use before the step and reserved: more than the budget of "
                f"{format_bytes(allowance.budget_bytes)}"
            )

    def _plan_together(
        self, program: Program, allowance: Allowance, plan: Callable[[], CachedPlan]
    ) -> tuple[CachedPlan, bool]:
        """What ``plan`` makes, or the first rank of this machine that planned the same step did; whether it is own.

        Nobody waits but for a plan that is being made: which steps other ranks will come to is not known.
        """
        if self._node is None:
            return plan(), True
        own: list[CachedPlan] = []

        def tell() -> bytes:
            own.append(plan())
            return self._cache.pack(own[0])

        told = self._node.compute_once(self._cache.name(program), tell)
        if own:
            return own[0], True
        planned = self._understood(told, program, allowance)
        return (planned, False) if planned is not None else (plan(), True)

    def is_left_to_others(self, program: Program) -> bool:
        """Whether another rank of this machine is the first to plan ``program`` again by what its steps took."""
        return self._node is not None and not self._node.is_first(self._name_again(program))

    def tell_again(self, program: Program, planned: CachedPlan) -> None:
        """Tells the other ranks what this one, being the first, has planned again."""
        if self._node is not None:
            self._node.publish(self._name_again(program), self._cache.pack(planned))

    def told_again(self, program: Program, allowance: Allowance) -> CachedPlan | None:
        """What a rank of this machine has planned again by now, if that does here."""
        told = self._node.fetch(self._name_again(program)) if self._node is not None else None
        return self._understood(told, program, allowance)

    def _name_again(self, program: Program) -> str:
        return f"{self._cache.name(program)}-again"

    def _understood(self, told: bytes | None, program: Program, allowance: Allowance) -> CachedPlan | None:
        """The plan that another rank told, if it does here, too."""
        planned = self._cache.unpack(program, told) if told else None
        return planned if planned is not None and self._still_serves(planned, program, allowance) else None

    def _reserve(self, tier: str, nbytes: int) -> None:
        """Makes room for a plan before its step runs: pinning takes a second for some GiB."""
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
