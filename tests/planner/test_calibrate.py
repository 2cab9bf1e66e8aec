from dataclasses import replace

import pytest

from lmswap.ir.machine import Host
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.planner import simulate
from lmswap.planner.calibrate import calibrate, calibrate_host
from tests.ir.build import build, unit_machine

# `a` of 4 bytes is away from op 1 to op 3: 4 s out, 4 s in; `b` is recomputed before op 3.
STEP = build(
    """
    forward
    f1 1: x -> a
    f2 2: x -> b
    f3 9: x -> y
    backward
    g1 3: t a b -> gx
    """,
    sizes={"a": 4},
    outputs="y",
    tangents="t",
    gradients="gx",
)
MACHINE = unit_machine()
PLAN = Plan(
    "hand-made",
    100,
    (Swap(STEP.id("a"), "host", 0, 1, 3, 3, 4),),
    0.0,
    0,
    {"host": 4096},
    recomputes=(Recompute(STEP.op("f2"), 3),),
)


def measured(forward: float, backward: float, *, stall: float = 0.0, out: float = 4.0, into: float = 4.0) -> Timeline:
    spans = [
        Span(Lane.COMPUTE, "forward 7", 0, forward / 2),
        Span(Lane.STALL, "wait", forward / 2, forward / 2 + stall),
        Span(Lane.COMPUTE, "forward 7", forward / 2 + stall, forward + stall),
        Span(Lane.COMPUTE, "backward 7", forward + stall, forward + stall + backward),
        Span(Lane.OUT, "a", 1, 1 + out, 4, 0),
        Span(Lane.IN, "a", 12, 12 + into, 4, 0),
    ]
    return Timeline("measured", tuple(spans), ())


def found(timeline: Timeline, op_seconds=None, *, machine=MACHINE, host_seconds=()):
    predicted = simulate(STEP.program, STEP.costs, machine, PLAN)
    phases = dict.fromkeys(span.name for span in timeline.spans if span.lane is Lane.COMPUTE)
    untimed = [(sum(span.seconds for span in timeline.spans if span.name == phase),) for phase in phases]
    measured = {"measured": timeline, "op_seconds": op_seconds or untimed, "host_seconds": host_seconds}
    return calibrate(STEP.program, STEP.costs, machine, PLAN, tier="host", predicted=predicted, **measured)


def test_ops_are_scaled_by_their_segment_recomputes_included():
    # Predicted are 1 + 2 + 9 s forward, 2 + 3 s backward; f2 took 4 and 1 s.
    made = found(measured(24.0, 2.5))
    assert made.costs.seconds == pytest.approx((2.0, 2.5, 18.0, 1.5))
    assert made.costs.scratch_bytes == STEP.costs.scratch_bytes


def test_copies_are_scaled_by_direction():
    link = found(measured(12.0, 5.0, out=6.0, into=2.0)).machine.tier("host").link
    assert link.out_rate.seconds(4) == pytest.approx(6.0)
    assert link.in_rate.seconds(4) == pytest.approx(2.0)


def test_calibrated_costs_predict_the_measurement():
    # 12 s forward hide 6 s of the copy out; of 5 s of the copy in, the recompute of f2 hides 2 s; 3 s follow.
    made = found(measured(12.0, 5.0, stall=3.0, out=6.0, into=5.0))
    assert simulate(STEP.program, made.costs, made.machine, PLAN).seconds == pytest.approx(20.0)
    assert made.measured_seconds == 20.0
    assert made.predicted_seconds == 19.0


def test_copies_side_by_side_count_once():
    twice = measured(12.0, 5.0)
    both = replace(twice, spans=(*twice.spans, Span(Lane.OUT, "a", 2, 5, 4, 0)))
    assert found(both).machine.tier("host").link.out_rate.seconds(4) == pytest.approx(4.0)


def test_exact_predictions_change_nothing():
    made = found(measured(12.0, 5.0, stall=2.0))
    # Of the 4 s of the copy in, the recompute of f2 hides 2 s.
    assert made.predicted_seconds == made.measured_seconds == 19.0
    assert made.costs.seconds == STEP.costs.seconds
    assert not made.is_out_of_tolerance


@pytest.mark.parametrize(("stall", "is_out_of_tolerance"), [(3.8, False), (4.0, True), (0.2, False), (0.0, True)])
def test_a_tenth_of_the_prediction_is_tolerated(stall, is_out_of_tolerance):
    assert found(measured(12.0, 5.0, stall=stall)).is_out_of_tolerance is is_out_of_tolerance


def test_another_sequence_of_segments_is_not_calibrated_from():
    forward_only = measured(12.0, 5.0).spans[:3]
    assert found(Timeline("measured", forward_only, ())) is None


# --- what each op took ------------------------------------------------------------------------------------------------

# Runs f1 f2 f3 | f2 again, g1.


def test_ops_are_corrected_to_what_each_took():
    # f2 ran twice and took 9 + 1 s instead of 2 + 2.
    made = found(measured(24.0, 5.0), [(3.0, 9.0, 12.0), (1.0, 4.0)])
    assert made.costs.seconds == pytest.approx((3.0, 5.0, 12.0, 4.0))


def test_the_worst_run_is_the_one_that_was_off_by_most_seconds():
    worst = found(measured(12.0, 9.0), [(1.0, 2.0, 9.0), (3.0, 6.0)]).worst
    assert (worst.op, worst.predicted_seconds, worst.measured_seconds) == (STEP.op("g1"), 3.0, 6.0)
    worst = found(measured(12.0, 9.0), [(1.0, 2.0, 9.0), (5.5, 3.5)]).worst
    assert (worst.op, worst.predicted_seconds, worst.measured_seconds) == (STEP.op("f2"), 2.0, 5.5)


def test_a_segment_whose_ops_were_not_timed_is_shared_as_predicted():
    # As one of Inductor's, or one that ran under another plan than this.
    made = found(measured(24.0, 5.0), [(24.0,), (1.0, 4.0)])
    assert made.costs.seconds == pytest.approx((2.0, (4.0 + 1.0) / 2, 18.0, 4.0))


def test_ops_predicted_to_cost_the_same_are_corrected_as_one():
    layers = build(
        """
        forward
        f1 2: x -> a
        f2 2: a -> b
        f3 4: b -> y
        """,
        outputs="y",
    )
    program = replace(layers.program, ops=tuple(replace(op, target="aten.relu") for op in layers.program.ops))
    plan = Plan("none", 100, (), 8.0, 0, {})
    predicted = simulate(program, layers.costs, MACHINE, plan)
    measured = {"measured": predicted, "op_seconds": [(1.0, 3.0, 8.0)]}
    made = calibrate(program, layers.costs, MACHINE, plan, tier="host", predicted=predicted, **measured)
    assert made.costs.seconds == pytest.approx((2.0, 2.0, 8.0))


# --- what the host took -----------------------------------------------------------------------------------------------


def test_if_the_device_waited_only_host_costs_are_corrected():
    # Of the forward's 3 ops and one copy the host takes 3 * 2 + 1 s as described; it took 21.
    machine = replace(MACHINE, host=Host(2.0, 1.0))
    made = found(measured(21.0, 5.0), machine=machine, host_seconds=(21.0, None))
    assert made.machine.host.op_seconds == pytest.approx(6.0)
    assert made.machine.host.copy_seconds == pytest.approx(3.0)
    assert made.costs.seconds == STEP.costs.seconds
    assert made.host_seconds == 21.0


def test_the_host_is_corrected_by_itself_as_it_is_with_all_else():
    machine = replace(MACHINE, host=Host(2.0, 1.0))
    assert calibrate_host(STEP.program, PLAN, machine, (21.0, None)).host.op_seconds == pytest.approx(6.0)
    assert calibrate_host(STEP.program, PLAN, machine, (None, None)) == machine
    assert calibrate_host(STEP.program, PLAN, machine, (21.0,)) == machine  # of another step
    assert calibrate_host(STEP.program, PLAN, MACHINE, (21.0, None)) == MACHINE


def test_ops_take_no_longer_together_than_their_segment_did_untimed():
    timed = [(2.0, 4.0, 18.0), (2.0, 3.0)]
    for before, forward in (((12.0, 9.0), 12.0), ((30.0, 9.0), 24.0), ((), 24.0)):
        predicted = simulate(STEP.program, STEP.costs, MACHINE, PLAN)
        how = {"predicted": predicted, "measured": measured(24.0, 5.0), "op_seconds": timed, "segment_seconds": before}
        made = calibrate(STEP.program, STEP.costs, MACHINE, PLAN, tier="host", **how)
        assert made.costs.seconds[STEP.op("f3")] == pytest.approx(18.0 * forward / 24.0)


def test_an_op_takes_no_longer_than_a_segment_that_waited():
    machine = replace(MACHINE, host=Host(2.0, 1.0))
    made = found(measured(6.0, 5.0), machine=machine, host_seconds=(6.0, None))  # 12 s were predicted
    assert made.costs.seconds[STEP.op("f3")] == pytest.approx(4.5)


def test_a_cpu_device_has_no_host_seconds():
    made = found(measured(24.0, 5.0), host_seconds=(24.0, 5.0))
    assert made.machine.host is None
    assert made.costs.seconds[STEP.op("f3")] == pytest.approx(18.0)
