"""Observes the steps of a model, calibrates their predictions, and replaces plans that no longer fit.

Measuring, deciding and acting are separate: `Replanner` measures a `StepObservation` at the boundary of two steps and
acts on the triggers that `lmswap.session.replan_triggers` finds in it, with at most one search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lmswap.capture.caller_memory import loss_bytes
from lmswap.collection_pause import collection_paused
from lmswap.errors import BudgetExceeded, LmswapError, PlanInfeasible, TierError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.schedule import schedule
from lmswap.planner.cache import CachedPlan
from lmswap.planner.calibrate import Calibration, calibrate
from lmswap.reporting.replan_reasons import (
    CompressedExcess,
    HeldGrowth,
    InUseGrowth,
    LossExcess,
    Trigger,
    UnusedMargin,
)
from lmswap.runtime.step_record import EndedStep, StepRecord
from lmswap.session import compression_ratio
from lmswap.session.allowance import GROWTH_BYTES
from lmswap.session.context import ModelContext
from lmswap.session.diagnostics import warn
from lmswap.session.plan_request import PlanRequest
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import FROM_CACHE, FROM_OTHER_RANK, Phase, PlannedStep
from lmswap.session.planner import Planner
from lmswap.session.replan_triggers import (
    StepObservation,
    counted,
    excess_held_bytes,
    merged,
    saves_by_accumulating,
    triggers,
    usual_peak_bytes,
)
from lmswap.session.step_sequence import CompletedStep
from lmswap.torch_compat.process_groups import is_distributed


class StepRun(NamedTuple):
    """A step that ran by the plan of ``graphs``, until one like it begins."""

    graphs: tuple[int, ...]
    ended: EndedStep
    ran: PlannedStep  # by its plan, for the sizes of the run
    is_steady: bool  # shows seconds: it ran in the planned order, and nothing was verified in it
    record: StepRecord | None  # if seconds are to be read from it
    shows_host: bool  # the host did no one-time work in it


class RepeatLimits(NamedTuple):
    """Up to which bytes of tensors, in a step and outside of it, repetitions of a step show nothing."""

    peak_bytes: int
    held_bytes: int


class Replanner:
    """Observes steps when they end, and replans them before their next run."""

    def __init__(self, context: ModelContext, planner: Planner, plans: StepPlans) -> None:
        self._options, self._planner, self._plans = context.options, planner, plans
        self._engine, self._memory, self._budget = context.engine, context.memory, context.budget
        self._retention, self._notes = context.retention, context.plan_notes
        self._runs: dict[int, StepRun] = {}  # by the first graph of a step: its last run
        self._num_computed = 0  # offsets that the arena has computed

    def observe(self, completed: CompletedStep) -> None:
        """Keep what a step that just ended has shown until one begins with the same graph."""
        ended, graphs, is_as_planned, ran = completed
        step = self._plans[graphs]
        # Verification takes time of its own, so its steps are no measurements.
        is_steady = is_as_planned and not self._options.verify
        num_before = self._num_computed
        self._num_computed = self._engine.arena.num_computed if self._engine.arena is not None else 0
        phase, known = step.history.phase, step.history.host_of
        # The host takes longer for code that runs for the first time, and while the arena computes offsets.
        shows_host = (
            step.machine.host is not None
            and is_steady
            and phase >= Phase.CALIBRATED
            and self._options.plan is None
            and self._num_computed == num_before
            and (known is None or not known.acts_as(step.plan))
        )
        following = step.history.after_run(is_steady=is_steady).phase
        reads = shows_host or phase is not following is not Phase.FINAL
        record = self._engine.recorder.last() if reads else None
        self._runs[graphs[0]] = StepRun(graphs, ended, ran, is_steady, record, shows_host)

    def pop_run(self, first: int) -> StepRun | None:
        """Return, once, the last run of a step that began with graph ``first``."""
        run = self._runs.pop(first, None)
        return run if run is not None and self._plans.get(run.graphs) is not None else None  # it may be evicted

    @collection_paused()
    def apply(self, run: StepRun, released: Callable[[], frozenset[int]]) -> bool:
        """Count what ``run`` has shown, and replan its step if that is a cause, before one like it runs.

        Args:
            run: of the step.
            released: returns, once, the outputs and tangents that the caller did not hold.

        Returns:
            True if its graphs have to be compiled for another plan.
        """
        before = self._plans[run.graphs]
        seen = self._measure(before, run, released)
        step = counted(before, seen)
        is_priced = seen.calibration is not None or seen.host_seconds is not None
        if is_priced:
            with self._engine.recorder.own.paused():
                self._planner.reserve_search_memory(step.merged.program)
                step = self._reprice(step)
        if step.adds_up and not before.adds_up:
            step = self._plans.adopt(step.graphs, step.merged, step, step.allowance, step.origin, history=step.history)
            self._memory.trim()  # the highest peak of its gradients is more than they will need
        self._plans.store(step)
        policy, is_fixed = self._options.policy, self._options.plan is not None
        found = triggers(before, step, seen, policy=policy, is_fixed=is_fixed)
        is_calibrated = before.history.phase is Phase.CALIBRATED is not step.history.phase
        may_follow = is_calibrated and all(isinstance(trigger, UnusedMargin) for trigger in found)
        if not (may_follow and self._follow_other_rank(step)) and found:
            with self._engine.recorder.own.paused():
                self._replan(step, found, is_priced=is_priced)
        if (excess := next((each for each in found if isinstance(each, CompressedExcess)), None)) is not None:
            self._settle_compression(step, excess)
        return not self._plans[run.graphs].runs_as(before)

    def shows_nothing(self, ended: EndedStep) -> bool:
        """Whether `apply` would find nothing in ``ended``, as in most runs of a final plan: it need not be observed."""
        step = self._plans.get(ended.follows)
        return (
            step is not None
            and step.history.phase is Phase.FINAL
            and step.machine.host is None
            and self._engine.arena is None
            and self._options.tier != compression_ratio.TIER
            and ended.peaks.used_bytes <= usual_peak_bytes(step)
            and excess_held_bytes(step, self._held_bytes(step, adds_up=step.adds_up)) <= step.slack_bytes
            and self._budget.earlier_output_bytes <= step.allowance.earlier_output_bytes + step.slack_bytes
            and not self._is_to_accumulate(step)
            and not self._planner.losses.grown
        )

    def repeat_limits(self, ended: EndedStep) -> RepeatLimits | None:
        """Return the limits for repetitions of ``ended``, which `shows_nothing`; None if each has to be observed."""
        step = self._plans.get(ended.follows)
        if step is None or step.moves or step.adds_up or self._options.verify:
            return None
        if step.merged.program.is_cyclic and self._engine.host_copies:  # some may have to become resident
            return None
        more_bytes, held_bytes = usual_peak_bytes(step) - ended.peaks.used_bytes, self._budget.held.nbytes
        more_held_bytes = step.slack_bytes - max(0, excess_held_bytes(step, held_bytes))
        return RepeatLimits(ended.peaks.tensor_bytes + more_bytes, held_bytes + more_held_bytes)

    def _held_bytes(self, step: PlannedStep, *, adds_up: bool) -> int:
        """Return what is held outside of ``step``; if it ``adds_up``, with gradients that are absent but will be."""
        return self._budget.held.nbytes + (self._absent_bytes(step) if adds_up else 0)

    def _absent_bytes(self, step: PlannedStep) -> int:
        """Return what gradients that are added up hold in ``step`` and not now, as far as its allowance counts that."""
        absent_bytes = self._budget.absent_gradient_bytes(step.merged.program)
        is_counted = step.adds_up and not self._budget.streams_gradients
        return absent_bytes + (self._plans.accumulated_bytes(step) if is_counted else 0)

    def _in_use_bytes(self, step: PlannedStep, small_bytes: int = 0) -> int:
        """Return what is in use outside of ``step``; ``small_bytes``, and absent gradients, will be allocated again."""
        return self._budget.in_use_bytes(small_bytes + (self._absent_bytes(step) if step.adds_up else 0))

    def _is_to_accumulate(self, step: PlannedStep) -> bool:
        """Whether ``step`` is to accumulate each gradient as it is computed, from now on; ranks do anyway."""
        may_accumulate = self._retention.may_accumulate(with_arena=self._engine.arena is not None)
        saves = may_accumulate and saves_by_accumulating(step, self._budget.held.nbytes)
        return saves and not self._options.verify and not is_distributed()

    def _measure(self, step: PlannedStep, run: StepRun, released: Callable[[], frozenset[int]]) -> StepObservation:
        """Measure what ``run`` of ``step`` has shown, and move the estimate of retention to that."""
        arena, program, record = self._engine.arena, step.merged.program, run.record
        peak_bytes, history = run.ended.peaks.used_bytes, step.history.after_run(is_steady=run.is_steady)
        is_first, has_advanced = step.history.num_runs == 0, history.phase is not step.history.phase
        have_others_run = run.ended.number < self._engine.recorder.num_steps  # and what is in use may have grown
        if arena is not None and (is_first or peak_bytes > step.allowance.budget_bytes):
            self._memory.trim()  # batches, for example, may leave memory in fragments too small for losses
        held_bytes, output_bytes = self._held_bytes(step, adds_up=step.adds_up), self._budget.earlier_output_bytes
        seen = StepObservation(history, peak_bytes, held_bytes, output_bytes)
        if self._is_to_accumulate(step):
            accumulated_bytes, held_bytes = self._plans.accumulated_bytes(step), self._held_bytes(step, adds_up=True)
            seen = replace(seen, accumulated_bytes=accumulated_bytes, held_bytes=held_bytes)
        if arena is not None and arena.num_unplaced:
            seen = replace(seen, has_misplaced=self._retention.assume_most())
        if self._options.tier == compression_ratio.TIER:
            taken_bytes = self._engine.native.tier_stats(self._options.tier).resident_bytes
            seen = replace(seen, compressed_bytes=taken_bytes)
        losses, is_short = self._planner.losses, peak_bytes > step.allowance.budget_bytes - step.slack_bytes
        # Elsewhere it would reset torch's own peaks.
        if arena is None and (step.moves or is_short) and self._memory.reports_changes():
            losses.watch(step.graphs)
        if is_first or (arena is None and not losses.grown.isdisjoint(step.graphs)):
            costs = self._planner.with_losses(step.costs, program, step.graphs)
            if costs != step.costs:
                seen = replace(seen, costs=costs, loss_bytes=loss_bytes(costs, program))
        if run.shows_host and record is not None:
            seen = replace(seen, host_seconds=record.host_seconds())
        match history.phase:
            case Phase.RECORDED if has_advanced:
                return self._start_recording(step, seen, run, released())
            case Phase.CALIBRATED if has_advanced:
                with self._engine.recorder.own.paused():
                    return self._calibrated(step, seen, run)
            case Phase.FINAL if has_advanced:
                return self._settled(step, seen)
            case Phase.FINAL if have_others_run or peak_bytes > usual_peak_bytes(step):
                self._decommit_excess(step, run)
                return replace(seen, in_use_bytes=self._in_use_bytes(step))
        return seen

    def _decommit_excess(self, step: PlannedStep, run: StepRun) -> None:
        """Decommit what steps of larger sizes have left for reuse, if ``step`` comes near to the budget with it."""
        peaks = run.ended.peaks
        if peaks.used_bytes > step.allowance.budget_bytes - step.slack_bytes:
            kept_bytes = self._memory.used_tensor_bytes() + self._memory.reusable_bytes()
            self._memory.decommit(max(0, kept_bytes - peaks.tensor_bytes))

    def _start_recording(
        self, step: PlannedStep, seen: StepObservation, run: StepRun, released: frozenset[int]
    ) -> StepObservation:
        """Return ``seen`` with the seconds of a warm run, on the way to `Phase.RECORDED`; time ops of the next run."""
        self._engine.recorder.time_ops()
        self._budget.start_reserve_probe()
        seconds = () if run.record is None else tuple(map(sum, run.record.op_seconds()))
        seconds = _scaled(seconds, run.ran, step)
        return replace(seen, history=replace(seen.history, segment_seconds=seconds, released=released))

    def _calibrated(self, step: PlannedStep, seen: StepObservation, run: StepRun) -> StepObservation:
        """Return ``seen`` with growth, and what the run that timed ops has shown, on the way to `Phase.CALIBRATED`."""
        self._memory.compact()  # tracing and timing leave up to 30 MiB that steps do not reuse
        self._retention.confirm()
        from_bytes = self._memory.min_counted_bytes()
        seen = replace(seen, history=replace(seen.history, min_counted_bytes=from_bytes))
        seen = self._with_growth(step, seen, step.small_bytes(from_bytes))
        unused_bytes = self._budget.end_reserve_probe(step.allowance)
        if (calibration := self._calibrate(step, run)) is None:
            return seen
        results_bytes = self._unused_results_bytes(step)
        seen = replace(seen, unused_reserve_bytes=unused_bytes, unused_results_bytes=results_bytes)
        return replace(seen, calibration=calibration)

    def _settled(self, step: PlannedStep, seen: StepObservation) -> StepObservation:
        """Return ``seen`` with growth, and the margin for what is left of it, on the way to `Phase.FINAL`."""
        # Ranks follow the first. Saving and loading what updates fetch may come later, and takes memory beside tensors.
        if step.moves and not self._budget.updates_in_chunks and not is_distributed():
            seen = replace(seen, settled_margin_bytes=self._budget.settled_margin_bytes(step.merged.program))
        return self._with_growth(step, seen)

    def _with_growth(self, step: PlannedStep, seen: StepObservation, small_bytes: int = 0) -> StepObservation:
        """Return ``seen`` with what is in use now; ``small_bytes`` of small tensors will be allocated again."""
        in_use_bytes, peak_bytes = self._in_use_bytes(step, small_bytes), seen.peak_bytes
        fragmented_bytes, trained = self._budget.fragmented_bytes(peak_bytes), self._budget.trained_memory()
        return replace(seen, in_use_bytes=in_use_bytes, fragmented_bytes=fragmented_bytes, trained=trained)

    def _calibrate(self, step: PlannedStep, run: StepRun) -> Calibration | None:
        """Calibrate costs and machine of ``step`` by the run that timed its ops; None if it shows nothing."""
        record, ran = run.record, run.ran
        if record is None or self._options.plan is not None:
            return None
        program = ran.merged.program
        calibration = calibrate(
            program,
            ran.costs,
            ran.machine,
            ran.plan,
            tier=self._options.tier,
            predicted=ran.predicted,
            measured=record.timeline(program.buffer_names),
            op_seconds=record.op_seconds(),
            host_seconds=record.host_seconds(),  # in the step before, the arena computed offsets
            segment_seconds=_scaled(step.history.segment_seconds, step, ran),
        )
        if calibration is None or ran is step:
            return calibration
        pairs = zip(calibration.costs.seconds, ran.costs.seconds, step.costs.seconds, strict=True)
        seconds = tuple(found / expected * planned if expected else planned for found, expected, planned in pairs)
        return replace(calibration, costs=replace(step.costs, seconds=seconds))

    def _unused_results_bytes(self, step: PlannedStep) -> int:
        """Return what ``step`` reserves for results that its caller, as is known now, does not hold."""
        if step.places is None or not step.moves:
            return 0
        places = self._planner.layout(step.merged.program, step.costs, step.plan, self._retention.assumed)
        return step.places.results_bytes - places.results_bytes if places is not None else 0

    def _reprice(self, step: PlannedStep) -> PlannedStep:
        """Return ``step``, planned by other costs, with a plan priced by its current ones, for the next process too."""
        priced = self._planner.priced(step)
        self._memory.compact()
        self._plans.remember(step.merged.program, priced)
        return priced

    def _replan(self, step: PlannedStep, found: Sequence[Trigger], *, is_priced: bool) -> None:
        """Answer the triggers ``found`` for ``step``: by a cached plan, or by one search. Add a note."""
        program = step.merged.program
        if self._options.plan is not None:
            self._notes.append(f"the plan stays that of '{self._options.plan}' {self._after_step()}: {_reason(found)}")
            return
        known = self._plans.load_cached_replan(step) if any(trigger.may_be_cached for trigger in found) else None
        if known is not None:
            self._activate(step, known, _reason(found), FROM_CACHE)
            return
        if any(trigger.is_timed for trigger in found) and self._plans.is_owned_by_other_rank(program):
            # This rank keeps its plan, and follows the new one from the next step on.
            found = [trigger for trigger in found if not trigger.is_timed]
        if found:
            self._search(step, found, is_priced=is_priced)
        if any(trigger.is_timed for trigger in found):
            self._plans.publish_replan(program, self._plans[step.graphs])

    def _search(self, step: PlannedStep, found: Sequence[Trigger], *, is_priced: bool) -> None:
        """Search a plan that answers the triggers ``found`` for ``step``, and activate it. Add a note."""
        program, why = step.merged.program, _reason(found)
        growth = [trigger for trigger in found if isinstance(trigger, (HeldGrowth, InUseGrowth))]
        if step.is_overdrawn and len(growth) == len(found):  # a search for less growth has failed
            self._notes.append(f"the plan stays as it was {self._after_step()}: {why}, and no plan takes less")
            return
        request = self._planner.request(program, step.costs, step.machine, step.allowance)
        request = merged(step, found, request, is_priced=is_priced)
        outgrown_bytes = step.history.outgrown_bytes + sum(trigger.nbytes for trigger in growth)
        if step.history.num_runs > 1 and any(isinstance(trigger, LossExcess) for trigger in found):
            outgrown_bytes += step.plan.predicted_peak_bytes - step.plan.budget_bytes
        step = replace(step, history=replace(step.history, outgrown_bytes=outgrown_bytes))
        if growth:
            self._memory.trim()  # of the plan that takes too much
        elif not is_priced:
            self._planner.reserve_search_memory(program)
        try:
            if any(isinstance(trigger, LossExcess) for trigger in found):
                met, planned = self._planner.search_within_budget(step.graphs, request)  # a share may be too small
            else:
                met, planned = self._planner.search(request)
        except (PlanInfeasible, TierError) as error:
            self._answer_refusal(step, request, error, why)
            return
        is_active = self._activate(step, planned, why, met=met)
        if is_active and all(trigger.recurs for trigger in found):
            self._plans.remember(program, planned)

    def _answer_refusal(self, step: PlannedStep, request: PlanRequest, refusal: LmswapError, why: str) -> None:
        """Activate the plan that takes the least, as none fits, unless that of ``step`` does; add a note."""
        max_bytes = step.tensor_peak_bytes - GROWTH_BYTES
        found = self._planner.search_least(request, refusal, max_bytes=max_bytes) if step.is_outgrown else None
        if found is None:
            self._keep_plan(step, why, refusal)
            return
        met, planned = found
        why = f"{why}; no plan fits the budget, and this one takes the least"
        if self._activate(step, planned, why, met=met):
            self._plans.keep_overdrawn(self._plans[step.graphs])

    def _follow_other_rank(self, step: PlannedStep) -> bool:
        """Activate the plan that another rank of this machine has made of its measurements; whether there is one."""
        planned = self._plans.fetch_replan(step.merged.program, step.allowance)
        is_other = planned is not None and not planned.plan.acts_as(step.plan)
        if planned is not None and is_other:
            self._activate(step, planned, FROM_OTHER_RANK)
        return is_other

    def _settle_compression(self, step: PlannedStep, excess: CompressedExcess) -> None:
        """Warn of ``excess``; release the tier's memory for another plan of ``step``, or accept it for the same."""
        taken, limit = format_bytes(excess.taken_bytes), format_bytes(excess.limit_bytes)
        warn(
            f"compressed tensors took {taken} of host memory, more than its limit of {limit}: they compress less than "
            "before. Where the limit is hard, give a host_budget that is lower by that much, or a larger budget",
            BudgetExceeded,
        )
        made = self._plans[step.graphs]
        if made.plan.acts_as(step.plan):
            machine = compression_ratio.with_needed_ratio(made.machine, made.plan, excess.taken_bytes)
            history = replace(made.history, accepted_bytes=excess.taken_bytes)
            self._plans.store(replace(made, machine=machine, history=history))
            return
        self._plans.store(replace(made, history=replace(made.history, accepted_bytes=0)))
        tier = self._options.tier
        try:
            self._engine.native.reserve(tier, self._plans.tier_bytes(tier), replace=True)
        except TierError as error:
            self._notes.append(f"the tier keeps the memory of the plan before {self._after_step()}: {error}")

    def _after_step(self) -> str:
        return f"after step {self._engine.recorder.num_steps}"

    def _activate(
        self, step: PlannedStep, planned: CachedPlan, why: str, source: str = "", *, met: PlanRequest | None = None
    ) -> bool:
        """Activate ``planned``, possibly of another process, instead of ``step``'s plan; add a note.

        ``met`` is the request that it meets, if it was searched for.

        Returns:
            False if its tier has no room for it; then the plan of ``step`` stays.
        """
        origin = f"replanned {self._after_step()} {source}".rstrip()
        is_same = planned.plan.acts_as(step.plan)
        allowance, retention = (met.allowance, met.retention) if met is not None else (step.allowance, None)
        made = step.graphs, step.merged, planned
        history = replace(step.history, segment_seconds=(), read_peak_bytes=0)
        try:
            self._plans.adopt(*made, allowance, origin, retention=retention, history=history)
        except TierError as error:
            self._keep_plan(step, why, error)
            return False
        if not is_same:
            self._memory.trim()  # the old plan's peak may exceed the new one's
        self._notes.append(f"{origin}: {why}" + ("; the plan is the same" if is_same else ""))
        return True

    def _keep_plan(self, step: PlannedStep, why: str, error: LmswapError) -> None:
        """Keep the plan of ``step``, as ``error`` says that there is no other; add a note."""
        self._notes.append(f"the plan stays as it was {self._after_step()}: {why}; {error.summary}")
        self._plans.keep_overdrawn(replace(step, allowance=replace(step.allowance, fragmented_bytes=0)))


def _scaled(segment_seconds: Sequence[float], ran: PlannedStep, other: PlannedStep) -> tuple[float, ...]:
    """Return the seconds of segments of ``ran`` for the sizes of ``other``, the same step by the same plan."""
    if ran is other:
        return tuple(segment_seconds)
    runs = schedule(ran.merged.program, ran.plan.recomputes)
    own, others = (runs.costs(step.costs).seconds for step in (ran, other))
    spans = [slice(segment.start, segment.stop) for segment in runs.program.segments]
    if len(spans) != len(segment_seconds):
        return ()
    return tuple(
        seconds * sum(others[span]) / sum(own[span]) if sum(own[span]) else seconds
        for seconds, span in zip(segment_seconds, spans, strict=True)
    )


def _reason(found: Sequence[Trigger]) -> str:
    """Return what the triggers ``found`` at one step boundary say."""
    return "; ".join(map(str, found))
