from dataclasses import replace

import pytest

from lmswap.ir.plan import Plan, Rerun, Swap
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.plan import simulate
from lmswap.plan.feedback import compare
from tests.ir.build import build, unit_machine

# `a` of 4 bytes is away from op 1 to op 3: 4 s out, 4 s in; `b` is made again before op 3.
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
    reruns=(Rerun(STEP.op("f2"), 3),),
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


def found(timeline: Timeline):
    predicted = simulate(STEP.program, STEP.costs, MACHINE, PLAN)
    arguments = {"tier": "host", "predicted": predicted, "measured": timeline}
    return compare(STEP.program, STEP.costs, MACHINE, PLAN, **arguments)


def test_ops_are_scaled_by_their_segment_second_runs_counted():
    # Predicted are 1 + 2 + 9 s forward, 2 + 3 s backward.
    made = found(measured(24.0, 2.5))
    assert made.costs.seconds == pytest.approx((2.0, 4.0, 18.0, 1.5))
    assert made.costs.scratch_bytes == STEP.costs.scratch_bytes


def test_copies_are_scaled_by_direction():
    link = found(measured(12.0, 5.0, out=6.0, into=2.0)).machine.tier("host").link
    assert link.out_rate.seconds(4) == pytest.approx(6.0)
    assert link.in_rate.seconds(4) == pytest.approx(2.0)


def test_what_was_corrected_predicts_what_was_measured():
    # 12 s forward hide 6 s of the copy out; of 5 s of the copy in, the second run of f2 hides 2 s; 3 s follow.
    made = found(measured(12.0, 5.0, stall=3.0, out=6.0, into=5.0))
    assert made.corrected_seconds == pytest.approx(20.0)
    assert made.measured_seconds == 20.0
    assert made.predicted_seconds == 19.0


def test_copies_side_by_side_count_once():
    twice = measured(12.0, 5.0)
    both = replace(twice, spans=(*twice.spans, Span(Lane.OUT, "a", 2, 5, 4, 0)))
    assert found(both).machine.tier("host").link.out_rate.seconds(4) == pytest.approx(4.0)


def test_what_came_as_predicted_changes_nothing():
    made = found(measured(12.0, 5.0, stall=2.0))
    # Of the 4 s of the copy in, the second run of f2 hides 2 s.
    assert made.predicted_seconds == made.measured_seconds == 19.0
    assert made.costs.seconds == STEP.costs.seconds
    assert not made.is_off


@pytest.mark.parametrize(("stall", "is_off"), [(3.8, False), (4.0, True), (0.2, False), (0.0, True)])
def test_a_tenth_of_the_prediction_is_tolerated(stall, is_off):
    assert found(measured(12.0, 5.0, stall=stall)).is_off is is_off


def test_another_sequence_of_segments_teaches_nothing():
    forward_only = measured(12.0, 5.0).spans[:3]
    assert found(Timeline("measured", forward_only, ())) is None


# --- what the waits for copies tell -----------------------------------------------------------------------------------

# Runs f1 f2 f3 | f2 again, g1: `a` leaves by the end of the forward, and arrives between the two of the backward.


def waits(*backward: float, leave: float = 0.0) -> Timeline:
    """A step whose backward computes for the given seconds before, between and after waits for `a`."""
    spans, clock = [Span(Lane.COMPUTE, "forward 7", 0, 12.0)], 12.0 + leave
    spans += [Span(Lane.STALL, "wait", 12.0, clock, buffer=STEP.id("a")), Span(Lane.COMPUTE, "forward 7", clock, clock)]
    for number, seconds in enumerate(backward):
        if number:
            spans.append(Span(Lane.STALL, "wait", clock, clock, buffer=STEP.id("a")))
        spans.append(Span(Lane.COMPUTE, "backward 7", clock, clock + seconds))
        clock += seconds
    return Timeline("measured", tuple(spans), ())


def test_ops_are_scaled_by_what_ran_between_two_waits():
    # f2 again took the 2 s that it was said to take; g1 took 6 s instead of 3.
    made = found(waits(2.0, 6.0))
    assert made.costs.seconds == pytest.approx((1.0, 2.0, 9.0, 6.0))
    worst = made.worst
    assert (worst.start, worst.stop, worst.predicted_seconds, worst.measured_seconds) == (4, 5, 3.0, 6.0)
    assert (made.first_op, made.last_op) == (STEP.op("g1"), STEP.op("g1"))


def test_the_second_run_of_an_op_does_not_change_what_its_first_was_measured_to_take():
    assert found(waits(8.0, 3.0)).costs.seconds == STEP.costs.seconds
    assert found(waits(8.0, 3.0)).first_op == STEP.op("f2")


def test_waits_of_another_number_than_planned_are_not_looked_at():
    # 8 s in all for the 5 s of the backward.
    assert found(waits(2.0, 1.0, 5.0)).costs.seconds == pytest.approx((1.0, 2.0, 9.0, 4.8))


def test_a_stretch_too_short_to_be_timed_is_joined_with_what_follows():
    quick = replace(STEP, costs=replace(STEP.costs, seconds=(1.0, 0.05, 9.0, 3.0)))
    predicted = simulate(quick.program, quick.costs, MACHINE, PLAN)
    arguments = {"tier": "host", "predicted": predicted, "measured": waits(1.0, 5.1)}
    made = compare(quick.program, quick.costs, MACHINE, PLAN, **arguments)
    assert made.costs.seconds[STEP.op("g1")] == pytest.approx(6.0)
