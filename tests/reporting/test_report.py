import json
import subprocess
import sys
from dataclasses import replace

import pytest

from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.plan import Decision, Recompute
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting import make_explanation
from lmswap.verify.summary import Verified
from tests.reporting.small_step import MIB, PLAN, PROGRAM, planned_report, report, timeline

GOLDEN = """\
lmswap report: Small on cpu (unit machine), after 3 steps
Swapping is on: policy 'swap_all' swaps 3.00 MiB (1 of 6 buffers) to the disk
tier.
Plan: made in 20 ms; costs 10.0 % over unlimited memory.

                  predicted   measured     error
peak              10.00 MiB   9.00 MiB   +11.1 %
  of it tensors               7.00 MiB
step                 5.50 s     6.00 s    -8.3 %
  of it stalled      500 ms     1.00 s   -50.0 %
swapped out        3.00 MiB   3.00 MiB     0.0 %
swapped in         3.00 MiB   3.00 MiB     0.0 %
disk tier, peak    3.00 MiB   3.00 MiB     0.0 %

Budget 12.00 MiB (growth of resident memory since enable) = 2.00 MiB before the
step + 1.00 MiB reserve + 1.00 MiB margin + 8.00 MiB for the step's tensors.
The measured peak is 75 % of the budget.
Measured in step 3, the last with a backward; error = predicted / measured - 1.
Note: module 'Head' runs uncaptured, because it calls numpy."""


def said(made) -> str:
    """What is printed, wherever lines end."""
    return " ".join(str(made).split())


def test_the_text_is_the_same_to_the_letter():
    assert str(report(notes=["module 'Head' runs uncaptured, because it calls numpy."])) == GOLDEN


def test_savings_and_costs_of_the_plan_come_first_if_there_are_any():
    sentence = "Saves 2.00 MiB: peak 9.00 MiB instead of 11.00 MiB (predicted without a plan); step 10.0 % longer."
    made = report(unplanned_step_bytes=8 * MIB)
    assert f"after 3 steps {sentence} Swapping is on" in said(made)
    assert "over unlimited memory" not in said(made)  # which says the same
    assert "Saves" not in said(report(unplanned_step_bytes=6 * MIB))
    assert "Saves" not in said(planned_report(unplanned_step_bytes=8 * MIB))


def test_stalls_outside_of_the_step_are_no_prediction_error():
    spans = tuple(span for span in timeline("measured").spans if span.lane is not Lane.STALL)
    (line,) = (
        line
        for line in str(
            report(
                measured=replace(timeline("measured"), spans=spans),
                predicted=replace(
                    timeline("predicted"),
                    spans=tuple(s for s in timeline("predicted").spans if s.lane is not Lane.STALL),
                ),
            )
        ).splitlines()
        if "of it stalled" in line
    )
    assert line.split()[-5:] == ["0", "s", "0", "s", "–"]


@pytest.mark.parametrize("variable", ["COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM"])
def test_the_text_does_not_depend_on_the_terminal(monkeypatch, variable):
    before = str(report())
    monkeypatch.setenv(variable, "20")
    assert str(report()) == before


def test_predicted_peak_counts_like_the_budget():
    made = report()
    # 2 MiB base + 1 MiB reserve + 7 MiB of the step; the margin stays free and is no part of a prediction.
    assert made.predicted_peak_bytes == 10 * MIB
    assert made.predicted.peak_bytes == made.predicted_peak_bytes
    assert made.measured.peak_bytes == made.measured_peak_bytes  # taken as it was recorded


def test_measured_fields_come_from_the_measured_timeline():
    made = report()
    assert (made.swapped_out_bytes, made.swapped_in_bytes, made.recomputed_bytes) == (3 * MIB, 3 * MIB, 0)
    assert (made.predicted_seconds, made.measured_seconds, made.stall_seconds) == (5.5, 6.0, 1.0)


def test_outputs_of_recomputes_are_reported_as_recomputed():
    recomputes = (Recompute(op=1, position=3),)  # relu again, just before its gradient
    spans = tuple(Span(Lane.COMPUTE, "", second, second + 1) for second in range(7))
    predicted = replace(timeline("predicted"), spans=spans)
    made = report(plan=replace(PLAN, swaps=(), recomputes=recomputes), predicted=predicted)
    assert made.recomputed_bytes == 2 * MIB
    assert "Nothing is swapped: policy 'swap_all' recomputes 2.00 MiB (1 of 6 buffers)." in said(made)
    both = report(
        plan=replace(PLAN, swaps=(), recomputes=(Recompute(op=0, position=3), *recomputes)), predicted=predicted
    )
    assert "Nothing is swapped: policy 'swap_all' recomputes 5.00 MiB (2 of 6 buffers)." in said(both)
    assert "to the disk tier and recomputes 2.00 MiB (1)" in said(
        report(plan=replace(PLAN, recomputes=recomputes), predicted=predicted)
    )


def test_an_emulated_link_is_named_next_to_the_achieved_rate():
    link = EmulatedLink(5e6, 2e6)
    # 3 MiB in 0.75 s out, and in 2 s in.
    assert "Link EMULATED: 0.005 GB/s out, 0.002 GB/s in; achieved: 0.00419 GB/s out, 0.00157 GB/s in." in said(
        report(emulated_link=link)
    )
    assert "in; achieved: nothing copied yet." in said(planned_report(emulated_link=link))
    assert "EMULATED" not in said(report())
    assert json.loads(report().to_json())["in_bytes_per_second"] == 1.5 * MIB  # reported in any case


def test_before_the_first_step_nothing_is_measured_which_the_text_states():
    made = planned_report()
    fields = ("measured_peak_bytes", "measured_seconds", "swapped_out_bytes", "swapped_in_bytes", "stall_seconds")
    assert [getattr(made, field) for field in fields] == [None] * 5
    assert "before the end of the first step" in said(made)
    assert str(made).count("not yet measured") == 6
    assert "Swapping is planned, not yet run: policy 'swap_all' swaps 3.00 MiB (1 of 6 buffers)" in said(made)


def test_before_the_capture_nothing_is_predicted_either():
    made = planned_report(program=None, plan=None, predicted=None)
    assert (made.predicted_peak_bytes, made.predicted_seconds, made.decisions) == (None, None, ())
    assert "Swapping: not decided yet" in said(made) and "not yet measured" not in said(made)
    assert made.policy == "swap_all"


def test_a_step_that_fits_states_that_swapping_is_off_and_why():
    made = report(policy="tflms", plan=replace(PLAN, swaps=()), measured=Timeline("measured", (), ()))
    assert "Swapping is off (policy 'tflms'): the whole step fits the budget of 12.00 MiB as it is." in said(made)


def test_policy_none_states_that_it_never_swaps():
    assert "Swapping is off (policy 'none'): this policy never swaps." in said(
        report(policy="none", plan=replace(PLAN, policy="none", swaps=()))
    )


def test_the_policy_is_the_requested_one():
    for inner in ("search", "auto (tflms)", "swap_all"):
        text = said(report(policy="auto", plan=replace(PLAN, policy=inner)))
        assert "policy 'auto' swaps 3.00 MiB (1 of 6 buffers)" in text
        assert inner not in text


def test_planned_swaps_that_did_not_run_are_not_called_on():
    unmoved = replace(timeline("measured"), spans=timeline("measured").spans[:4])
    text = said(report(measured=unmoved))
    assert "Swapping did NOT happen in step 3" in text
    assert "Swapping is on" not in text


def test_the_host_budget_is_shown_beside_the_plans_use():
    text = said(planned_report(host_budget_bytes=5 * MIB))
    assert "Host budget 5.00 MiB: the plan uses 3.00 MiB of the disk tier." in text
    assert "Host budget" not in said(planned_report())


def test_reserved_swap_memory_is_reported_with_the_time_of_its_reservation():
    reserved = planned_report(tier_reserved_bytes=300 * MIB, tier_reserve_seconds=1.5)
    assert "The disk tier has 300.00 MiB, reserved in 1.50 s." in said(reserved)
    assert "reserved in" not in said(planned_report())


def test_the_plans_state_is_one_sentence_with_details_below():
    why = "replanned after step 3: measured 1.64 s against 2.61 s predicted; most off is op 'mm' (small.py:8)"
    made = report(plan_origin="replanned after step 3", plan_notes=[why])
    assert "\nPlan: replanned after step 3; costs 10.0 % over unlimited memory.\n" in str(made)
    assert "small.py" not in said(made)
    assert "Plan: replanned after step 3, not final yet; costs" in said(replace(made, is_final=False))
    explained = make_explanation(PROGRAM, PLAN, policy="auto", free_seconds=5.0, plan_notes=made.plan_notes)
    assert "step 5.50 s, 10.0 % over unlimited memory, at most 10.0 % above the best possible" in said(explained)
    assert why in said(explained)


def test_no_note_on_a_budget_exceeded_by_verification():
    verifying = said(report(verified=Verified("Small"), measured_peak_bytes=13 * MIB, unplanned_step_bytes=20 * MIB))
    assert "The budget is not kept while verifying." in verifying
    assert [words for words in ("OVER", "Budget 12", "of the budget", "Saves") if words in verifying] == []
    assert "not kept" not in said(report())


def test_a_plan_without_a_certificate_claims_nothing():
    explained = make_explanation(PROGRAM, replace(PLAN, certificate=None), policy="auto")
    assert "its optimality gap is unknown" in said(explained)


def test_a_budget_below_fixed_memory_shows_no_negative_bytes():
    text = said(report(budget_parts=(("before the step", 11 * MIB), ("reserve", MIB), ("margin", MIB))))
    assert (
        "Budget 12.00 MiB (growth of resident memory since enable) leaves nothing for the step's tensors: 11.00 MiB "
        "before the step + 1.00 MiB reserve + 1.00 MiB margin are 1.00 MiB more."
    ) in text


def test_the_budget_names_parameters_gradients_and_optimizer_state():
    fixed = FixedMemory(9 * MIB, 3 * MIB, MIB, MIB, 4 * MIB, 2 * MIB, MIB, 3 * MIB, device_type="cuda")
    text = said(report(budget_bytes=20 * MIB, budget_parts=tuple(fixed.parts()), gradient_bytes=5 * MIB))
    assert (
        "= 4.00 MiB parameters + 2.00 MiB gradients + 1.00 MiB optimizer state + 2.00 MiB else before the step + 3.00 "
        "MiB reserved for optimizer state + 1.00 MiB margin + 7.00 MiB for the step's tensors (gradients among them: "
        "5.00 MiB)."
    ) in text


def test_the_budget_of_growth_states_what_the_process_holds_in_addition():
    fixed = FixedMemory(9 * MIB, parameter_bytes=4 * MIB, device_type="cpu")
    given = {"uncounted_bytes": fixed.uncounted_bytes, "excluded_bytes": 400 * MIB}
    text = said(report(budget_parts=tuple(fixed.parts()), **given))
    assert "= 9.00 MiB before the step + 3.00 MiB for the step's tensors." in text
    assert (
        "The process holds 400.00 MiB more, which do not count: what was resident before (the parameters are 4.00 MiB "
        "of it), and code loaded since."
    ) in text


def test_a_step_that_held_more_before_is_named():
    text = said(report(highest_peak_bytes=15 * MIB, highest_peak_step=1))
    assert "The measured peak is 75 % of the budget." in text
    assert "The highest peak so far was 15.00 MiB, in step 1: OVER the budget by 3.00 MiB." in text
    assert "highest" not in said(report())
    assert "highest" not in said(report(highest_peak_bytes=9 * MIB + 2, highest_peak_step=1))  # 75 %, too
    assert "highest so far 5.00 MiB" in said(report(tier_highest_bytes=5 * MIB))


def test_calls_since_the_last_training_step_are_reported():
    text = said(report(steps=7, step=3))
    assert "after 7 steps" in text
    assert (
        "step 3, the last with a backward; error = predicted / measured - 1. Since then the model ran 4 times" in text
    )
    assert "step 1, which had no backward, as none so far;" in said(report(steps=1, step=1, trains=False))


def test_a_peak_over_the_budget_is_reported():
    assert "The measured peak is OVER the budget by 1.00 MiB." in said(report(measured_peak_bytes=13 * MIB))


def test_an_error_without_a_measurement_or_of_nothing_is_a_dash():
    text = str(report(measured=timeline("measured", stall_seconds=0)))
    (stalled,) = [line for line in text.splitlines() if "stalled" in line]
    assert stalled.split() == ["of", "it", "stalled", "500", "ms", "0", "s", "–"]


def test_decisions_name_the_users_lines():
    decisions = {row.name: row for row in report().decisions}
    conv = decisions["conv"]
    assert (conv.made_at, conv.made_by) == ("small.py:8 x = self.conv(x)", "aten.convolution.default")
    assert (conv.last_used_at, conv.last_used_by) == (conv.made_at, "aten.convolution_backward.default")
    assert (conv.decision, conv.reason, conv.nbytes) == (Decision.SWAP, "idle for 2 ops", 3 * MIB)
    assert decisions["relu"].decision is Decision.KEEP
    assert decisions["relu"].last_used_by == "aten.expand.default"
    assert decisions["grad_loss"].made_by == ""  # the caller hands it in
    assert "weight" not in decisions  # lives outside the step


def test_a_buffer_is_made_where_it_is_first_written():
    in_place = replace(PROGRAM.ops[1], writes=(1, 2))
    ops = (PROGRAM.ops[0], in_place, *PROGRAM.ops[2:])
    decisions = {row.name: row for row in report(program=replace(PROGRAM, ops=ops)).decisions}
    assert decisions["conv"].made_by == "aten.convolution.default"


def test_json_holds_every_field():
    data = json.loads(report().to_json())
    assert data["schema"] == "lmswap.report/3"
    assert (data["step"], data["trains"], data["highest_peak_step"]) == (3, True, 3)
    assert data["measured_peak_bytes"] == 9 * MIB
    assert data["decisions"][0]["decision"] == "swap"
    assert data["predicted"]["spans"][0]["lane"] == "compute"
    assert len(data["decisions"]) == len(PROGRAM.buffers) - 1


def test_metrics_are_the_known_figures_as_prefixed_plain_numbers():
    metrics = planned_report().metrics()
    assert metrics["lmswap/budget_bytes"] == planned_report().budget_bytes
    assert metrics["lmswap/predicted_peak_bytes"] == planned_report().predicted_peak_bytes
    assert not {"lmswap/peak_bytes", "lmswap/step_seconds", "lmswap/swapped_out_bytes"} & set(metrics)

    measured = report().metrics("lmswap/generator/")
    assert measured["lmswap/generator/peak_bytes"] == report().measured_peak_bytes
    assert measured["lmswap/generator/swapped_in_bytes"] == report().swapped_in_bytes
    assert {type(figure) for figure in measured.values()} == {int, float}


def test_reports_are_read_without_torch():
    code = "import sys; from tests.reporting.small_step import report; str(report()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_whose_device_waits_for_the_host_is_called_host_bound():
    measured_seconds = report().measured_seconds
    assert measured_seconds is not None
    assert "Host-bound for 50 % of the step" in said(report(host_bound_seconds=measured_seconds / 2))
    assert "Host-bound" not in said(report(host_bound_seconds=0.0))
    assert "Host-bound" not in said(report(host_bound_seconds=None))
    predicted = timeline("predicted", stall_seconds=0)
    waits = replace(predicted, spans=(*predicted.spans, Span(Lane.HOST, "conv", 1.0, 1.5)))
    assert "predicted to wait 500 ms for the host" in said(report(predicted=waits))
    assert "for the host" not in said(report(predicted=predicted))


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"num_traces": 1}, "came with 1 trace."),
        ({"num_traces": 3, "num_sized_plans": 4}, "came with 3 traces and 4 plans for sizes that vary."),
        ({"num_traces": 3, "num_sized_plans": 1, "num_evicted_traces": 2}, "1 plan for sizes that vary; 2 used least"),
    ],
)
def test_traces_and_the_plans_for_sizes_that_vary_are_counted_apart(figures, text):
    assert text in said(replace(report(), trace_bytes=MIB, **figures))
