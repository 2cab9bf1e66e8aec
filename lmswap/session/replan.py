"""Evaluates after each step whether its predictions must be calibrated and its plan replaced.

Replanning is triggered by loss memory, accumulated gradients, growth between steps, tensors held in the arena,
compression, and by measured seconds that differ from the prediction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lmswap.capture.caller_memory import loss_bytes
from lmswap.capture.numerics.gradient_order import is_distributed
from lmswap.errors import PlanInfeasible, TierError
from lmswap.execute.engine import SwapEngine
from lmswap.execute.step_record import EndedStep, StepRecord
from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind
from lmswap.options import Options
from lmswap.plan import simulate
from lmswap.plan.cache import CachedPlan
from lmswap.plan.calibrate import Calibration, calibrate
from lmswap.session.budget import GROWTH_BYTES, BudgetTracker
from lmswap.session.compression_ratio import Compression
from lmswap.session.diagnostics import Notes
from lmswap.session.host_calibration import HostTime
from lmswap.session.plan_store import FROM_CACHE, FROM_OTHER_RANK, StepPlans
from lmswap.session.planned_step import PlannedStep
from lmswap.session.planner import Planner
from lmswap.session.replan_reasons import ADDS_UP, has_grown, has_room, holds_more, is_in_use, is_settled, was_off
from lmswap.session.step_sequence import CompletedStep, StepObservation

# Earlier steps touch their memory for the first time, and choose algorithms.
STEADY_STEP = 3
# After the first steps "auto" searches this many times as long as before them, once: when it replans, and for a plan
# that by measured costs may be slower than the best by more than this share. A smaller gain is ignored.
_SECOND_EFFORT = 4
_WORTH_SEARCHING = 0.01
# Memory that becomes available once growth is known causes replanning if it exceeds this share of the budget.
_WORTH_USING = 0.04


class Replanner:
    """Observes the steps of a model, calibrates their predictions, and replaces plans that no longer fit."""

    def __init__(
        self,
        options: Options,
        tier: str,
        *,
        plans: StepPlans,
        planner: Planner,
        engine: SwapEngine,
        memory: DeviceMemory,
        budget: BudgetTracker,
        notes: Notes,
    ) -> None:
        """``notes`` takes sentences for reports on its plans."""
        self._options, self._tier, self._retention = options, tier, planner.retention
        self._plans, self._planner, self._engine, self._memory = plans, planner, engine, memory
        self._budget, self._notes = budget, notes
        self._num_runs: Counter[tuple[int, ...]] = Counter()  # by step
        self._shown: dict[int, StepObservation] = {}  # by the first graph of a step: its last observation
        self._outgrown: Counter[tuple[int, ...]] = Counter()  # by step: bytes of growth that its plan had no room for
        self._read_at: dict[tuple[int, ...], int] = {}  # by step: the peak at the last measurement of growth
        self._compression = Compression(tier, engine)
        self._host_time = HostTime(engine)

    def observe(self, followed: CompletedStep) -> None:
        """Keep the observation of a step that just ended until one begins with the same graph."""
        ended, graphs, is_as_planned = followed
        num_runs = self._num_runs[graphs] = self._num_runs[graphs] + 1
        # Verification takes time of its own, so its steps are no measurements.
        num_steady = num_runs if is_as_planned and not self._options.verify else 0
        self._host_time.step_ended()
        step = self._plans.get(graphs) if self._options.plan is None else None
        shows_host = step is not None and self._host_time.is_shown(step)
        is_measured = num_steady in (STEADY_STEP - 1, STEADY_STEP) or (num_steady > STEADY_STEP and shows_host)
        record = self._engine.recorder.last() if is_measured else None
        self._shown[graphs[0]] = StepObservation(graphs, ended, record, num_runs, num_steady)

    def pop_observation(self, first: int) -> StepObservation | None:
        """Return, once, the observation of the last step that began with graph ``first``."""
        shown = self._shown.pop(first, None)
        return shown if shown is not None and self._plans.get(shown.graphs) is not None else None  # it may be evicted

    def apply(self, shown: StepObservation, released: Callable[[], frozenset[int]]) -> bool:
        """Evaluate the replan triggers for the observed step, before one like it runs.

        Args:
            shown: the observation.
            released: returns, once, the outputs and tangents that the caller did not hold.

        Returns:
            True if the step has another plan now.
        """
        graphs, num_steady = shown.graphs, shown.num_steady
        if num_steady == STEADY_STEP - 1:
            self._record_seconds(self._plans[graphs], shown.record, released())
            self._engine.recorder.time_ops()
            self._budget.start_reserve_probe()
        over_bytes = shown.ended.peaks.used_bytes - self._plans[graphs].allowance.budget_bytes
        if self._engine.arena is not None and (shown.num_runs == 1 or over_bytes > 0):
            self._memory.trim()  # batches, for example, may leave memory in fragments too small for losses
        is_other = self._check_grad_accumulation(self._plans[graphs])
        is_other |= self._check_held(self._plans[graphs])
        if num_steady > STEADY_STEP + 1:
            is_other |= self._check_growth(self._plans[graphs], shown.ended)
        is_other |= self._check_arena_miss(self._plans[graphs])
        is_other |= self._check_compression(self._plans[graphs])
        if shown.num_runs == 1:
            is_other |= self._check_loss_memory(self._plans[graphs])
        if num_steady == STEADY_STEP:
            is_other |= self._calibrate(self._plans[graphs], shown)
        if num_steady == STEADY_STEP + 1:
            is_other |= self._finalize(self._plans[graphs], shown)
        if num_steady > STEADY_STEP and shown.record is not None and not is_other:
            step = self._plans[graphs]  # predicted by the host time of a step without one-time work
            if (machine := self._host_time.read(step, shown.record)) != step.machine:
                self._reprice(replace(step, machine=machine))
        return is_other

    def _check_loss_memory(self, step: PlannedStep) -> bool:
        """Replan if the loss, whose memory is known after one step, does not fit; whether the plan changed.

        Until then its memory is assumed or cached.
        """
        program = step.joined.program
        costs = self._planner.with_losses(step.costs, program, step.graphs)
        if costs == step.costs:
            return False
        measured = replace(step, costs=costs)
        peak_bytes = simulate(program, costs, step.machine, step.plan).peak_bytes
        if peak_bytes <= step.plan.budget_bytes or step.is_overdrawn:
            self._plans.predict(replace(measured, plan=replace(step.plan, predicted_peak_bytes=peak_bytes)))
            return False
        self._planner.reserve_search_memory(program)
        taken = format_bytes(loss_bytes(costs, program))
        return self._replan(measured, f"the loss takes {taken}, more than the plan leaves it", remembers=True)

    def _check_grad_accumulation(self, step: PlannedStep) -> bool:
        """Accumulate each gradient as it is computed, once a loop adds them up and memory is short; whether it begins.

        Ranks do so anyway, and verification of a backward needs all of its gradients at once.
        """
        can_begin = step.joined.program.kind_of_gradients is BufferKind.GRADIENT
        adds_up = self._retention.may_accumulate(with_arena=self._engine.arena is not None)
        if not (can_begin and adds_up) or is_distributed() or self._options.verify:
            return False
        is_short = step.plan.swaps or step.plan.recomputes or step.is_overdrawn
        if not is_short and self._budget.excess_held_bytes(step.allowance) <= GROWTH_BYTES:
            return False
        adding = self._plans.with_accumulated_grads(step)
        self._memory.trim()  # their highest peak is more than they will need
        self._planner.reserve_search_memory(adding.joined.program)
        if (known := self._plans.load_cached_replan(adding)) is not None:
            self._activate(adding, known, ADDS_UP, FROM_CACHE)
        else:
            self._replan(adding, ADDS_UP, remembers=True)
        return True

    def _check_held(self, step: PlannedStep) -> bool:
        """Count what tensors outside of the step hold more than planned; replan if the plan has no room for it.

        Returns whether the plan changed.
        """
        more_bytes = self._budget.excess_held_bytes(step.allowance)
        if more_bytes <= GROWTH_BYTES:
            return False
        step = replace(step, allowance=step.allowance.with_held(more_bytes))
        return self._replan_for_growth(step, more_bytes, holds_more(more_bytes))

    def _check_growth(self, step: PlannedStep, ended: EndedStep) -> bool:
        """Count other growth in the same way, if a peak has risen or exceeds the budget."""
        peak_bytes = ended.peaks.used_bytes
        if peak_bytes <= min(self._read_at[step.graphs] + GROWTH_BYTES, step.allowance.budget_bytes):
            return False
        self._read_at[step.graphs] = peak_bytes
        allowance = self._budget.with_growth(step.allowance, 0, 0)
        more_bytes = allowance.grown_bytes - step.allowance.grown_bytes
        if more_bytes <= GROWTH_BYTES:
            return False
        return self._replan_for_growth(replace(step, allowance=allowance), more_bytes, is_in_use(more_bytes))

    def _replan_for_growth(self, step: PlannedStep, more_bytes: int, reason: str) -> bool:
        """Replan ``step``, whose allowance counts growth by ``more_bytes``, if its plan has no room for it.

        From the second time on the plan leaves twice the growth free, if it can, as each replanning changes the plan.
        """
        self._plans.store(step)
        if step.excess_bytes <= 0:
            return False
        if step.is_overdrawn:  # a search for less growth has shown that no plan takes less
            self._notes.append(f"the plan stays as it was {self._after_step()}: {reason}, and no plan takes less")
            return False
        ahead_bytes = 2 * self._outgrown[step.graphs]
        self._outgrown[step.graphs] += more_bytes
        self._planner.reserve_search_memory(step.joined.program)
        return self._replan(step, reason, ahead_bytes=ahead_bytes)

    def _check_arena_miss(self, step: PlannedStep) -> bool:
        """Assume once that the caller holds more, after a tensor occupied an offset of the next step.

        Returns whether the step's plan or offsets changed.
        """
        arena = self._engine.arena
        if arena is None or not arena.num_unplaced or not self._retention.raise_():
            return False
        self._replan(step, "a tensor of a step was still held at offsets of the next one")
        return self._plans[step.graphs].places != step.places

    def _check_compression(self, step: PlannedStep) -> bool:
        """Replan if compressed tensors exceed the host memory of their tier."""
        excess = self._compression.excess(step)
        if not excess:
            return False
        self._planner.reserve_search_memory(step.joined.program)
        measured = replace(step, machine=self._compression.with_measured_ratio(step))
        is_other = self._replan(measured, excess, remembers=True)
        made = self._plans[step.graphs]
        if is_other:
            self._compression.reset(made)
        else:
            self._plans.store(replace(made, machine=self._compression.with_needed_ratio(made)))
        return is_other

    def _record_seconds(self, step: PlannedStep, record: StepRecord | None, released: frozenset[int]) -> None:
        """Keep the seconds of the last step, as ops are timed in the next one, and what was released.

        ``released`` are the outputs and tangents that the caller did not hold; predictions rely on that, plans do not.
        """
        seconds = () if record is None else tuple(map(sum, record.op_seconds()))
        self._plans.store(replace(step, segment_seconds=seconds, released=released))

    def _calibrate(self, step: PlannedStep, shown: StepObservation) -> bool:
        """Calibrate costs by the last step; replan if the prediction was off or the plan may be slow.

        What is in use between steps is known from now on. Returns whether the plan of ``step`` changed.
        """
        self._memory.compact()  # tracing and timing leave up to 30 MiB that steps do not reuse
        self._retention.confirm()
        step = self._with_growth(step, step.small_bytes(self._memory.counted_from_bytes()), shown.ended)
        record = shown.record if self._options.plan is None else None
        if record is None:
            return False
        program = step.joined.program
        found = calibrate(
            program,
            step.costs,
            step.machine,
            step.plan,
            tier=self._tier,
            predicted=step.predicted,
            measured=record.timeline(program.buffer_names, other_bytes=0),
            op_seconds=record.op_seconds(),
            host_seconds=record.host_seconds(),  # in the step before, the arena computed offsets
            segment_seconds=step.segment_seconds,
        )
        if found is None:
            return False
        self._planner.reserve_search_memory(program)
        step = replace(step, costs=found.costs, machine=found.machine)
        step = self._reprice(replace(step, machine=self._compression.with_needed_ratio(step)))
        return self._decide(step, found)

    def _decide(self, step: PlannedStep, found: Calibration) -> bool:
        """Replan ``step``, priced by its last run, if calibration ``found`` a reason; whether the plan changed.

        A cached plan of an earlier process for the same reason is used instead.
        """
        step = replace(step, allowance=self._budget.release_unused_reserve(step.allowance))
        self._plans.store(step)
        # A search has shown that no plan takes less, or there is nothing to swap without a backward.
        if (step.is_overdrawn and not step.allowance.spared_bytes) or not step.backwards:
            return False
        if step.allowance.spared_bytes and (known := self._plans.load_cached_replan(step)) is not None:
            return self._activate(step, known, has_room(step.allowance.spared_bytes), FROM_CACHE)
        if found.is_off:
            return self._replan_measured(step, was_off(found, step.joined.program))
        if step.is_outgrown:
            return self._replan(step, has_grown(step.allowance), remembers=True, priced=step.plan)
        room = self._room_left(step)
        return self._replan_measured(step, room) if room is not None else self._search_longer(step)

    def _room_left(self, step: PlannedStep) -> str | None:
        """Return a reason if ``step`` needs less outside of the arena than assumed, of reserve or for results."""
        if step.places is None or not (step.plan.swaps or step.plan.recomputes):
            return None
        places = self._planner.layout(step.joined.program, step.costs, step.plan)
        if places is None:
            return None
        spared_bytes, results_bytes = step.allowance.spared_bytes, step.places.results_bytes - places.results_bytes
        return has_room(spared_bytes, results_bytes) if spared_bytes + results_bytes > GROWTH_BYTES else None

    def _finalize(self, step: PlannedStep, shown: StepObservation) -> bool:
        """Measure again what is in use between steps, now that a new plan's graphs are compiled and the search is over.

        Returns whether the plan changed, for growth or to the one of another rank.
        """
        step = self._with_growth(step, 0, shown.ended)  # small tensors of the last step are in use now
        if (step.plan.swaps or step.plan.recomputes) and not is_distributed():  # ranks follow the first
            step = replace(step, allowance=self._budget.settled(step.allowance, step.joined.program))
            self._plans.store(step)
        if step.is_outgrown:
            self._planner.reserve_search_memory(step.joined.program)
            return self._replan(step, has_grown(step.allowance), remembers=True)
        planned = self._plans.fetch_replan(step.joined.program, step.allowance)
        if planned is not None and not planned.plan.acts_as(step.plan):
            return self._activate(step, planned, FROM_OTHER_RANK)
        return self._use_margin(step)

    def _use_margin(self, step: PlannedStep) -> bool:
        """Replan to use the part of the margin that is not needed, if it is large; whether the plan changed."""
        room_bytes = step.allowance.step_bytes - step.room.step_bytes
        can_use = step.allowance.settled_margin_bytes is not None and self._options.policy != "swap_all"
        is_worth = room_bytes > _WORTH_USING * step.allowance.budget_bytes
        if not (can_use and is_worth) or step.is_overdrawn or self._options.plan is not None:
            return False
        reason = is_settled(room_bytes)
        if (known := self._plans.load_cached_replan(step)) is not None:
            return self._activate(step, known, reason, FROM_CACHE)
        self._planner.reserve_search_memory(step.joined.program)
        return self._replan(step, reason, remembers=True)

    def _with_growth(self, step: PlannedStep, small_bytes: int, ended: EndedStep) -> PlannedStep:
        """Return ``step`` with what is in use between steps now, small tensors included."""
        self._read_at[step.graphs] = ended.peaks.used_bytes
        allowance = self._budget.with_growth(step.allowance, small_bytes, ended.peaks.used_bytes)
        return self._plans.predict(replace(step, allowance=allowance))

    def _reprice(self, step: PlannedStep) -> PlannedStep:
        """Return ``step``, planned by other costs, with a prediction by its current ones."""
        priced = self._plans.priced(step)
        self._memory.compact()
        self._plans.remember(step.joined.program, priced)
        return self._plans.predict(priced)

    def _search_longer(self, step: PlannedStep) -> bool:
        """Search for longer if the plan may not be the best by measured costs; whether the plan changed."""
        if self._options.policy != "auto" or step.origin == FROM_CACHE or step.plan.certificate is None:
            return False
        excess = step.plan.predicted_seconds / step.plan.certificate.seconds - 1
        if excess <= _WORTH_SEARCHING:
            return False
        reason = f"the plan was {excess:.1%} above the best possible, and a longer search found a faster one"
        return self._replan_measured(step, reason, most_seconds=(1 - _WORTH_SEARCHING) * step.plan.predicted_seconds)

    def _replan_measured(self, step: PlannedStep, reason: str, *, most_seconds: float = math.inf) -> bool:
        """Replan by the costs of the last step, by which ``step`` is priced: on the first rank of a machine only.

        The others keep their plan, and follow the new one from the next step on.
        """
        program = step.joined.program
        if self._plans.is_owned_by_other_rank(program):
            return False
        is_other = self._replan(step, reason, most_seconds=most_seconds, remembers=True, priced=step.plan)
        self._plans.publish_replan(program, self._plans[step.graphs])
        return is_other

    def _replan(
        self,
        step: PlannedStep,
        reason: str,
        *,
        most_seconds: float = math.inf,
        remembers: bool = False,
        priced: Plan | None = None,
        ahead_bytes: int = 0,
    ) -> bool:
        """Search a plan for ``step`` by its costs, machine and allowance, activate it and add a note.

        Args:
            step: the step to replan.
            reason: for the note.
            most_seconds: a plan that takes longer is not activated.
            remembers: write the plan to the cache.
            priced: the old plan if its certificate is by the same costs; it is reused.
            ahead_bytes: left free in addition if a plan can.

        Returns:
            True if the plan changed.
        """
        after = self._after_step()
        if self._options.plan is not None:
            self._notes.append(f"the plan stays that of '{self._options.plan}' {after}: {reason}")
            return False
        program = step.joined.program
        try:
            step, plan = self._search(step, priced, ahead_bytes)
        except (PlanInfeasible, TierError) as error:
            self._notes.append(f"the plan stays as it was {after}: {reason}; {error}")
            self._plans.keep_overdrawn(replace(step, allowance=replace(step.allowance, fragmented_bytes=0)))
            return False
        if plan.predicted_seconds > most_seconds:
            return False
        planned = CachedPlan(plan, step.costs, step.machine, step.allowance.room)
        if remembers:
            self._plans.remember(program, planned)
        return self._activate(step, planned, reason)

    def _search(self, step: PlannedStep, priced: Plan | None, ahead_bytes: int) -> tuple[PlannedStep, Plan]:
        """Search a plan for ``step`` with ``ahead_bytes`` more free; without them if no plan fits so."""

        def search(step: PlannedStep) -> tuple[PlannedStep, Plan]:
            program, costs, machine, allowance = step.joined.program, step.costs, step.machine, step.allowance
            return step, self._planner.search(program, costs, machine, allowance, effort=_SECOND_EFFORT, priced=priced)

        with suppress(PlanInfeasible, TierError):
            if ahead_bytes:
                return search(replace(step, allowance=step.allowance.ahead(ahead_bytes)))
        return search(step)

    def _after_step(self) -> str:
        return f"after step {self._engine.recorder.num_steps}"

    def _activate(self, step: PlannedStep, planned: CachedPlan, reason: str, source: str = "") -> bool:
        """Activate ``planned``, possibly of another process, instead of ``step``'s plan; whether that changes it."""
        when = " ".join(filter(None, (self._after_step(), source)))
        adopted = self._plans.adopt(step.graphs, step.joined, planned, step.allowance, f"replanned {when}")
        self._plans.store(replace(adopted, released=step.released))
        is_same = planned.plan.acts_as(step.plan)
        if not is_same:
            self._memory.trim()  # the old plan's peak may exceed the new one's
        self._notes.append(f"replanned {when}: {reason}" + ("; the plan is the same" if is_same else ""))
        return not is_same
