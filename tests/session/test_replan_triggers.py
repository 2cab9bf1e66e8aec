"""Triggers of replanning, from observations as plain data: no model, no device, no torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from lmswap.capture.merge_programs import MergedPrograms
from lmswap.ir.machine import Host, Machine, Tier
from lmswap.ir.program import BufferKind
from lmswap.planner import make_plan
from lmswap.planner.calibrate import Calibration, OpTime
from lmswap.reporting.replan_reasons import (
    AccumulatedGradients,
    CompressedExcess,
    HeldGrowth,
    InUseGrowth,
    LossExcess,
    MisplacedTensor,
    PredictionOff,
    UnusedMargin,
    UnusedMemory,
    WarmUpGrowth,
)
from lmswap.session.allowance import GROWTH_BYTES, Allowance
from lmswap.session.plan_request import PlanRequest
from lmswap.session.planned_step import FROM_CACHE, History, Phase, PlannedStep
from lmswap.session.replan_triggers import (
    StepObservation,
    counted,
    merged,
    saves_by_accumulating,
    triggers,
    usual_peak_bytes,
)
from lmswap.session.retention import Retention
from tests.ir.build import build, unit_machine

MIB = 2**20
STEP = build(
    """
    forward
    f1 1: x W -> a
    f2 1: a -> b
    loss 1: b -> y
    backward
    g2 1: t b -> c
    g1 1: c a -> gx
    """,
    sizes={"a": 64 * MIB, "b": 64 * MIB, "c": 64 * MIB, "gx": 4 * MIB},
    outputs="y",
    tangents="t",
    gradients="gx",
)
BASE_BYTES, RESERVE_BYTES, MARGIN_BYTES = 100 * MIB, 20 * MIB, 32 * MIB


def planned(policy="none", *, spare_bytes=0, machine=None, **fields) -> PlannedStep:
    """A step whose plan takes all of its allowance but ``spare_bytes``; it has run as far as ``fields`` say."""
    machine = machine or unit_machine(out=2.0**26, into=2.0**26)
    tier = machine.tiers[0].name
    plan = make_plan(policy, STEP.program, STEP.costs, machine, budget_bytes=2**40, tier=tier, min_swap_bytes=1)
    budget_bytes = BASE_BYTES + RESERVE_BYTES + MARGIN_BYTES + plan.predicted_peak_bytes + spare_bytes
    allowance = Allowance(budget_bytes, BASE_BYTES, 30 * MIB, RESERVE_BYTES, MARGIN_BYTES)
    plan = replace(plan, budget_bytes=allowance.step_bytes)
    merged = MergedPrograms(STEP.program, (0,))
    step = PlannedStep(plan, STEP.costs, machine, allowance.room, (7,), merged, allowance, allowance, "made in 1 s")
    return replace(step, **fields)


def shown(step: PlannedStep, **fields) -> StepObservation:
    """A run that shows nothing but ``fields``: tensors outside of it hold what was planned."""
    held_bytes = step.allowance.tensor_bytes + step.allowance.kept_reserve_bytes
    return StepObservation(step.history, 0, held_bytes, **fields)


def found(before: PlannedStep, seen: StepObservation, *, policy="auto", is_fixed=False):
    return triggers(before, counted(before, seen), seen, policy=policy, is_fixed=is_fixed)


def requested(step: PlannedStep, found, *, is_priced=True) -> PlanRequest:
    request = PlanRequest(step.merged.program, step.costs, step.machine, step.allowance, Retention.ACCUMULATED, "auto")
    return merged(step, found, request, is_priced=is_priced)


def in_phase(phase: Phase, **fields) -> History:
    return History(phase, 3, **fields)


def calibration(step: PlannedStep, *, predicted=10.0, measured=10.0) -> Calibration:
    worst = OpTime(0, predicted / 2, measured / 2)
    return Calibration(predicted, measured, step.costs, step.machine, worst)


def test_triggers_import_no_torch():
    code = "import sys, lmswap.session.replan_triggers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("phase", Phase)
def test_a_run_as_planned_triggers_nothing(phase):
    step = planned(history=in_phase(phase))
    assert found(step, shown(step)) == ()


def test_a_run_that_shows_nothing_leaves_a_final_step_the_same_object():
    step = planned(history=in_phase(Phase.FINAL))
    assert counted(step, shown(step)) is step


@pytest.mark.parametrize(
    ("phase", "num_runs", "is_steady", "following"),
    [
        (Phase.TRACED, 0, True, Phase.TRACED),
        (Phase.TRACED, 1, True, Phase.RECORDED),
        (Phase.TRACED, 5, False, Phase.TRACED),
        (Phase.TRACED, 6, True, Phase.RECORDED),
        (Phase.RECORDED, 2, False, Phase.RECORDED),
        (Phase.RECORDED, 2, True, Phase.CALIBRATED),
        (Phase.CALIBRATED, 3, True, Phase.FINAL),
        (Phase.FINAL, 4, True, Phase.FINAL),
    ],
)
def test_phases_advance_one_by_one_and_by_steady_runs_only(phase, num_runs, is_steady, following):
    assert History(phase, num_runs).after_run(is_steady=is_steady).phase is following


def test_held_tensors_cause_a_replan_if_the_plan_has_no_room_for_them():
    step = planned()
    seen = shown(step)
    seen = replace(seen, held_bytes=seen.held_bytes + GROWTH_BYTES + 1)
    assert found(step, seen) == (HeldGrowth(GROWTH_BYTES + 1),)
    assert counted(step, seen).allowance.base_bytes == BASE_BYTES + GROWTH_BYTES + 1
    assert found(planned(spare_bytes=2 * GROWTH_BYTES), seen) == ()
    assert found(step, replace(seen, held_bytes=seen.held_bytes - 1)) == ()


def test_what_updates_take_and_give_back_is_no_room_for_held_tensors_and_growth():
    step, kept_bytes = planned(), 2 * MIB
    step = replace(step, allowance=replace(step.allowance, window_bytes=RESERVE_BYTES - kept_bytes))
    held_bytes = step.allowance.tensor_bytes + RESERVE_BYTES
    holding = counted(step, replace(shown(step), held_bytes=held_bytes)).allowance
    assert holding.tensor_bytes == held_bytes - kept_bytes
    grown = counted(step, shown(step, in_use_bytes=BASE_BYTES + RESERVE_BYTES)).allowance
    assert grown.base_bytes == BASE_BYTES + RESERVE_BYTES - kept_bytes
    assert holding.reserve_bytes == grown.reserve_bytes == RESERVE_BYTES


def test_growth_besides_tensors_causes_a_replan_in_the_final_phase_only():
    in_use_bytes = BASE_BYTES + RESERVE_BYTES + 4 * GROWTH_BYTES
    for phase, expected in ((Phase.FINAL, (InUseGrowth(4 * GROWTH_BYTES),)), (Phase.RECORDED, ())):
        step = planned(history=in_phase(phase))
        assert found(step, shown(step, in_use_bytes=in_use_bytes)) == expected
    step = planned(spare_bytes=10 * MIB, history=in_phase(Phase.FINAL))  # the margin shrinks by the rest
    assert found(step, shown(step, in_use_bytes=in_use_bytes)) == ()


def test_growth_of_more_than_half_of_a_settled_margin_causes_a_replan():
    step = planned(history=in_phase(Phase.FINAL))
    settled = step.allowance.settled(4 * MIB)
    step = replace(step, allowance=replace(settled, budget_bytes=settled.budget_bytes - 28 * MIB))
    assert step.excess_bytes == 0
    in_use_bytes = BASE_BYTES + RESERVE_BYTES + 2 * MIB
    assert found(step, shown(step, in_use_bytes=in_use_bytes)) == ()
    assert found(step, shown(step, in_use_bytes=in_use_bytes + 1)) == (InUseGrowth(2 * MIB + 1),)
    seen = shown(step)
    assert found(step, replace(seen, held_bytes=seen.held_bytes + 2 * MIB)) == ()
    assert found(step, replace(seen, held_bytes=seen.held_bytes + 2 * MIB + 1)) == (HeldGrowth(2 * MIB + 1),)


@pytest.mark.parametrize("phase", [Phase.CALIBRATED, Phase.FINAL])
@pytest.mark.parametrize(("less_bytes", "kept_bytes"), [(0, 4 * MIB), (MIB, 3 * MIB), (5 * MIB, 2 * MIB)])
def test_less_in_use_than_planned_is_predicted_and_is_a_part_of_the_settled_margin(phase, less_bytes, kept_bytes):
    step = planned()
    seen = shown(step, in_use_bytes=BASE_BYTES - less_bytes, settled_margin_bytes=4 * MIB)
    final = counted(step, replace(seen, history=in_phase(phase)))
    assert final.allowance.base_bytes == BASE_BYTES - less_bytes
    assert final.allowance.margin_bytes == kept_bytes + less_bytes
    assert final.allowance.spared_margin_bytes == MARGIN_BYTES - kept_bytes
    assert final.allowance.step_bytes == step.allowance.settled(kept_bytes).step_bytes
    again = replace(shown(final, in_use_bytes=BASE_BYTES - less_bytes - MIB), history=final.history)
    assert counted(final, again).allowance.base_bytes == BASE_BYTES - less_bytes - MIB


def test_less_than_nothing_is_never_predicted_to_be_in_use():
    step = planned(history=in_phase(Phase.FINAL))
    assert counted(step, shown(step, in_use_bytes=-5 * MIB)).allowance.base_bytes == 0


def test_a_step_that_no_plan_fits_is_replanned_for_large_growth_only():
    step = planned(history=in_phase(Phase.FINAL), is_overdrawn=True)
    step = replace(step, allowance=step.allowance.settled(0))
    seen = shown(step)
    for nbytes, expected in ((GROWTH_BYTES, ()), (GROWTH_BYTES + 1, (HeldGrowth(GROWTH_BYTES + 1),))):
        tighter = replace(step.allowance, budget_bytes=step.allowance.budget_bytes - MARGIN_BYTES - MIB)
        assert found(replace(step, allowance=tighter), replace(seen, held_bytes=seen.held_bytes + nbytes)) == expected


@pytest.mark.parametrize("margin_bytes", [32 * MIB, 4 * MIB, 0])
def test_a_plan_of_another_start_takes_at_most_half_of_the_margin(margin_bytes):
    step = planned()
    allowance = step.allowance.settled(margin_bytes)
    slack_bytes = min(8 * MIB, margin_bytes // 2)
    assert allowance.slack_bytes == slack_bytes
    peak_bytes = step.plan.predicted_peak_bytes
    assert step.fits(peak_bytes - slack_bytes, allowance.slack_bytes)
    assert not step.fits(peak_bytes - slack_bytes - 1, allowance.slack_bytes)


def test_growth_besides_tensors_is_measured_after_a_higher_peak():
    step = planned(history=in_phase(Phase.FINAL, read_peak_bytes=200 * MIB))
    assert usual_peak_bytes(step) == 200 * MIB + GROWTH_BYTES
    beyond = replace(step, history=in_phase(Phase.FINAL, read_peak_bytes=2**40))
    assert usual_peak_bytes(beyond) == step.allowance.budget_bytes


def test_growth_is_measured_once_more_after_the_last_search_of_the_warm_up():
    step = planned(history=in_phase(Phase.CALIBRATED))
    seen = replace(shown(step, in_use_bytes=BASE_BYTES + RESERVE_BYTES), peak_bytes=100 * MIB)
    final = counted(step, replace(seen, history=replace(step.history, phase=Phase.FINAL)))
    assert usual_peak_bytes(final) < seen.peak_bytes
    assert usual_peak_bytes(counted(final, replace(seen, history=final.history))) >= seen.peak_bytes


@pytest.mark.parametrize("more_bytes", [-MIB, 3 * MIB])
def test_a_change_that_the_margin_absorbs_is_predicted_and_leaves_the_step_as_much(more_bytes):
    step = planned(history=in_phase(Phase.FINAL))
    step = counted(step, shown(step, in_use_bytes=BASE_BYTES + RESERVE_BYTES + 2 * GROWTH_BYTES))
    seen = shown(step, in_use_bytes=BASE_BYTES + RESERVE_BYTES + 2 * GROWTH_BYTES + more_bytes)
    changed = counted(step, seen)
    assert found(step, seen) == ()
    assert changed.allowance.base_bytes == step.allowance.base_bytes + more_bytes
    assert changed.allowance.step_bytes == step.allowance.step_bytes
    growing = replace(seen, in_use_bytes=seen.in_use_bytes + GROWTH_BYTES)
    assert counted(changed, growing).allowance.grown_bytes == (
        3 * GROWTH_BYTES + more_bytes if more_bytes > 0 else 2 * GROWTH_BYTES
    )


def test_a_margin_absorbs_no_more_than_itself():
    allowance = planned().allowance
    assert allowance.drifted(2**40).margin_bytes == 0
    assert allowance.drifted(MIB).drifted(2**40) == allowance.drifted(2**40)


@pytest.mark.parametrize("phase", [Phase.CALIBRATED, Phase.FINAL])
def test_growth_of_the_first_steps_beyond_the_margin_causes_a_replan(phase):
    step = planned(history=in_phase(Phase(phase - 1)))
    in_use_bytes = BASE_BYTES + RESERVE_BYTES + MARGIN_BYTES
    seen = shown(step, in_use_bytes=in_use_bytes, calibration=calibration(step))
    seen = replace(seen, history=in_phase(phase))
    assert found(step, seen) == (WarmUpGrowth(MARGIN_BYTES, 0),)
    assert found(replace(step, is_overdrawn=True), seen) == ()
    assert "32.00 MiB more are in use between steps" in str(found(step, seen)[0])
    fragmented = replace(seen, in_use_bytes=0, fragmented_bytes=16 * MIB)
    assert found(step, fragmented) == (WarmUpGrowth(0, 16 * MIB),)


def test_gradients_are_accumulated_from_now_on():
    step = planned("swap_all")
    assert step.moves
    seen = shown(step, accumulated_bytes=3 * MIB)
    assert found(step, seen) == (AccumulatedGradients(),)
    after = counted(step, seen)
    assert after.adds_up
    assert after.allowance.tensor_bytes == step.allowance.tensor_bytes + 3 * MIB
    fewer = counted(step, replace(seen, held_bytes=0))
    assert fewer.allowance == after.allowance  # what is held less now was planned for, and may come
    assert after.merged.program.kind_of_gradients is BufferKind.ACCUMULATED_GRADIENT
    assert found(after, shown(after)) == ()


def test_accumulating_saves_memory_where_it_is_short_and_once():
    moving, unmoved = planned("swap_all"), planned()
    planned_bytes = unmoved.allowance.tensor_bytes + unmoved.allowance.reserve_bytes
    assert saves_by_accumulating(moving, 0)
    assert not saves_by_accumulating(counted(moving, shown(moving, accumulated_bytes=MIB)), 0)
    assert not saves_by_accumulating(unmoved, planned_bytes + GROWTH_BYTES)
    assert saves_by_accumulating(unmoved, planned_bytes + GROWTH_BYTES + 1)
    assert saves_by_accumulating(replace(unmoved, is_overdrawn=True), 0)


def test_a_misplaced_tensor_causes_a_replan():
    step = planned()
    assert found(step, shown(step, has_misplaced=True)) == (MisplacedTensor(),)


def test_a_loss_that_takes_more_than_the_plan_leaves_causes_a_replan():
    step = planned()
    op = STEP.op("f2")
    for nbytes, expected in ((0, ()), (100 * MIB, (LossExcess(100 * MIB),))):
        seen = shown(step, costs=step.costs.with_scratch({op: nbytes}), loss_bytes=nbytes)
        assert found(step, seen) == expected
    assert counted(step, seen).plan.predicted_peak_bytes > step.plan.predicted_peak_bytes
    assert found(replace(step, is_overdrawn=True), seen) == ()


def compressing(capacity_bytes: int) -> Machine:
    machine = unit_machine()
    return replace(machine, tiers=(Tier("compressed", capacity_bytes, machine.tiers[0].link, ratio=4.0),))


def test_compressed_bytes_over_the_limit_replan_until_accepted():
    step = planned("swap_all", machine=compressing(40 * MIB))
    assert found(step, shown(step, compressed_bytes=40 * MIB)) == ()
    seen = shown(step, compressed_bytes=50 * MIB)
    assert found(step, seen) == (CompressedExcess(50 * MIB, 40 * MIB),)
    planned_bytes = step.plan.tier_bytes["compressed"]
    assert counted(step, seen).machine.tier("compressed").ratio == pytest.approx(0.9 * planned_bytes / (50 * MIB))
    accepted = replace(step, history=replace(step.history, accepted_bytes=50 * MIB))
    assert found(accepted, seen) == ()
    assert found(accepted, replace(seen, compressed_bytes=51 * MIB))


def calibrated(step: PlannedStep, **fields) -> StepObservation:
    seen = shown(step, **{"calibration": calibration(step), **fields})
    return replace(seen, history=replace(step.history, phase=Phase.CALIBRATED))


RECORDED = {"history": in_phase(Phase.RECORDED)}


def test_a_prediction_that_is_off_causes_a_replan():
    step = planned(**RECORDED)
    off = calibration(step, measured=12.0)
    assert found(step, calibrated(step, calibration=off)) == (
        PredictionOff(12.0, 10.0, 0.0, STEP.program.ops[0].title, 6.0, 5.0),
    )
    assert found(step, calibrated(step)) == ()
    assert found(replace(step, is_overdrawn=True), calibrated(step, calibration=off)) == ()


def test_unneeded_memory_outside_the_arena_replans_a_plan_that_moves_bytes():
    for policy in ("swap_all", "none"):
        step = planned(policy, origin=FROM_CACHE, **RECORDED)
        seen = calibrated(step, unused_reserve_bytes=6 * MIB, unused_results_bytes=3 * MIB)
        assert found(step, seen) == ((UnusedMemory(6 * MIB, 3 * MIB),) if policy == "swap_all" else ())
        assert found(step, replace(seen, unused_results_bytes=2 * MIB)) == ()


def test_a_large_margin_that_known_growth_does_not_need_replans():
    step = planned("swap_all", history=in_phase(Phase.CALIBRATED))
    seen = replace(shown(step, settled_margin_bytes=12 * MIB), history=in_phase(Phase.FINAL))
    assert found(step, seen) == (UnusedMargin(20 * MIB),)
    assert found(step, seen, is_fixed=True) == found(step, seen, policy="swap_all") == ()
    assert found(step, replace(seen, settled_margin_bytes=31 * MIB)) == ()


def test_all_triggers_of_a_boundary_are_one_request():
    step = planned(**RECORDED)
    seen = calibrated(step, calibration=calibration(step, measured=12.0), has_misplaced=True)
    seen = replace(seen, held_bytes=seen.held_bytes + 2 * GROWTH_BYTES)
    after, all_found = counted(step, seen), found(step, seen)
    assert [type(trigger) for trigger in all_found] == [HeldGrowth, MisplacedTensor, PredictionOff]
    request = requested(after, all_found)
    assert (request.priced, request.ahead_bytes) == (after.plan, 0)


def test_recurring_growth_is_planned_ahead_as_far_as_a_plan_fits():
    step = planned(history=in_phase(Phase.FINAL, outgrown_bytes=5 * MIB))
    request = requested(step, [HeldGrowth(MIB)], is_priced=False)
    choices = (Retention.ACCUMULATED, Retention.UNTIL_BACKWARD)
    alternatives = [*request.alternatives(choices)]
    assert [each.retention for each in alternatives] == [*choices, *choices]
    assert [each.allowance.ahead_bytes for each in alternatives] == [10 * MIB, 10 * MIB, 0, 0]
    other = requested(step, [MisplacedTensor()], is_priced=False)
    assert [each.allowance for each in other.alternatives(choices[:1])] == [step.allowance]


def test_the_hosts_time_is_calibrated_for_the_plan_that_ran():
    machine = replace(unit_machine(), host=Host(1.0, 0.0))
    step = planned("swap_all", machine=machine, history=in_phase(Phase.FINAL))
    after = counted(step, shown(step, host_seconds=(6.0, None)))  # 3 ops
    assert after.machine.host == Host(2.0, 0.0)
    assert after.history.host_of is step.plan


def test_reserve_and_margin_that_are_not_needed_are_counted_apart():
    """A plan file takes the spared reserve from the next process's reserve, and its whole margin stays."""
    step = planned("swap_all", history=in_phase(Phase.CALIBRATED))
    counts = step.allowance.sparing(5 * MIB).settled(MARGIN_BYTES - 10 * MIB)
    assert counts.reserve_bytes == RESERVE_BYTES - 5 * MIB
    assert counts.spared_bytes == 15 * MIB
    for room, margin_bytes in ((counts.room, 10 * MIB), (counts.at_start().room, 0)):
        assert (room.spared_reserve_bytes, room.spared_margin_bytes) == (5 * MIB, margin_bytes)
