"""The report of an enabled model, from the state of its session after the last step."""

from __future__ import annotations

from typing import Any

from lmswap.analyze.memory import StepMemory
from lmswap.reporting import Report, make_report
from lmswap.reporting.step import StepFigures
from lmswap.session.planned_step import Phase, PlannedStep
from lmswap.session.session import Session
from lmswap.training_state.updates import Updates


def snapshot(session: Session) -> Report:
    """Return the figures of the last step that had a backward, or, if none had one, of the last step."""
    session.memory.synchronize()
    recorder, options = session.recorder, session.options
    last, step = recorder.last_training(), session.current_step()
    session.warn_budget_exceeded()
    tier = session.engine.native.tier_stats(options.tier)
    state_out_bytes, state_in_bytes = session.streaming.copied_bytes(step)
    figures: dict[str, Any] = {}
    if step is not None:
        figures |= {
            "plan_origin": step.origin,
            "is_final": step.history.phase is Phase.FINAL or options.plan is not None or options.verify,
            "base_bytes": step.allowance.base_bytes,
            "reserve_bytes": step.allowance.reserve_bytes,
            "margin_bytes": step.allowance.margin_bytes,
            "budget_parts": step.allowance.parts,
            "uncounted_bytes": step.allowance.account.uncounted_bytes,
            "gradient_bytes": step.merged.program.gradient_bytes,
            "predicted": step.predicted,
            "free_seconds": step.costs.free_seconds,
        }
    if last is not None:
        figures |= {
            "step": last.step.number,
            "trains": last.step.trains,
            # Without a plan the names of what it moved are unknown.
            "measured": last.timeline(step.merged.program.buffer_names if step is not None else ()),
            "measured_peak_bytes": last.step.peaks.used_bytes,
            "measured_tensor_peak_bytes": last.step.peaks.tensor_bytes,
            "own_seconds": None if session.is_hooked(last.step.sequence) else last.step.own_seconds,
            "host_bound_seconds": last.host_bound_seconds if session.device.type == "cuda" else None,
            "tier_peak_bytes": last.step.peaks.tier_bytes,
        }
    if recorder.highest is not None:
        figures |= {
            "highest_peak_bytes": recorder.highest.peaks.used_bytes,
            "highest_peak_step": recorder.highest.number,
        }
    known = StepFigures(
        model=session.name,
        device=session.memory.description(),
        policy=options.policy,
        tier=options.tier,
        emulated_link=options.link,
        host_budget_bytes=options.host_budget_bytes,
        budget_bytes=session.budget.nbytes,
        counted=session.budget.counted,
        excluded_bytes=session.memory.excluded_bytes(),
        steps=recorder.num_steps,
        tier_used_bytes=tier.used_bytes,
        tier_highest_bytes=tier.peak_used_bytes,
        tier_reserved_bytes=tier.capacity_bytes,
        tier_reserve_seconds=tier.reserve_seconds,
        tier_resident_bytes=tier.peak_resident_bytes,
        state_bytes=session.streaming.nbytes,
        state_copied_out_bytes=state_out_bytes,
        state_copied_in_bytes=state_in_bytes,
        trace_bytes=session.traces.nbytes,
        num_traces=session.traces.num_traced,
        num_sized_plans=session.traces.num_sized,
        num_evicted_traces=session.traces.num_evicted,
        notes=(*session.all_notes, *session.streaming.notes_on_cpu_updates(step)),
        plan_notes=tuple(session.plan_notes),
        verified=session.verified,
        **figures,
    )
    if step is None:
        return make_report(known)
    return make_report(
        known,
        program=step.merged.program,
        plan=step.plan,
        placed_bytes=step.places.total_bytes if step.places else None,
        unplanned_step_bytes=StepMemory(step.merged.program, step.costs).peak.nbytes,
        update_peak_bytes=_update_peak_bytes(session.updates, step) if step.allowance.update_bytes else 0,
    )


def _update_peak_bytes(updates: Updates, step: PlannedStep) -> int:
    """Return the peak of the update after ``step``, like the budget."""
    allowance, left_bytes = step.allowance, step.predicted.memory[-1][1]  # weights that are resident between steps
    gradient_bytes = 0 if step.adds_up else step.merged.program.gradient_bytes
    before_bytes = allowance.base_bytes + allowance.kept_reserve_bytes
    return before_bytes + left_bytes + gradient_bytes + (updates.update_bytes if updates else allowance.update_bytes)
