"""The simulator on a unit machine, where every expected number can be derived by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import OptionError
from lmswap.ir.machine import Host, Link, Rate
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.timeline import Lane
from lmswap.planner import simulate, verify
from tests.ir.build import build, unit_machine
from tests.ir.strategies import machines, steps
from tests.planner.instances import INSTANCES, Instance
from tests.planner.random_swaps import random_plans

STEP = build(
    """
    forward
    f1 1: x -> a
    f2 2: a -> b
    f3 3: b -> y
    backward
    g3 2: t b -> gb
    g2 4: a gb -> gx
    """,
    sizes={"a": 4, "b": 3},
    scratch={"f3": 5},
    outputs="y",
    tangents="t",
    gradients="gx",
)


def plan(*swaps: Swap) -> Plan:
    return Plan("hand-made", 2**30, swaps, 0.0, 0, {"host": 2**20})


def spans(timeline, lane):
    return [(span.name, span.start_seconds, span.end_seconds) for span in timeline.spans if span.lane is lane]


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_known_plans_take_the_seconds_derived_by_hand(instance: Instance):
    plan = instance.plan()
    timeline = simulate(instance.step.program, instance.step.costs, instance.machine, plan)
    assert timeline.seconds == instance.swap_seconds
    assert timeline.peak_bytes <= instance.budget_bytes
    verify(
        instance.step.program,
        instance.step.costs,
        instance.machine,
        replace(plan, predicted_peak_bytes=timeline.peak_bytes),
    )


def test_without_swaps_ops_run_back_to_back_and_memory_is_the_curve():
    timeline = simulate(STEP.program, STEP.costs, unit_machine(), plan())
    assert spans(timeline, Lane.COMPUTE) == [("f1", 0, 1), ("f2", 1, 3), ("f3", 3, 6), ("g3", 6, 8), ("g2", 8, 12)]
    # f1 a; f2 a b; f3 a b y + 5 of scratch; g3 a b y t gb; g2 a y t gb gx (t: its caller holds it); end
    assert timeline.memory == ((0, 4), (1, 7), (3, 13), (6, 10), (8, 8), (12, 0))
    assert timeline.peak_bytes == 13


def test_a_hidden_copy_costs_no_time():
    # a, 4 bytes, leaves in [3, 7) and is released before g3 (at 7, so g3 waits 1), returns in [7, 11) under g3 [7, 9)
    # and keeps g2 waiting from 9 to 11.
    swap = Swap(STEP.id("a"), "host", 0, 2, 3, 3, 4)
    timeline = simulate(STEP.program, STEP.costs, unit_machine(), plan(swap))
    assert spans(timeline, Lane.OUT) == [("a", 3, 7)]
    assert spans(timeline, Lane.IN) == [("a", 7, 11)]
    assert spans(timeline, Lane.STALL) == [("a to leave", 6, 7), ("a to arrive", 9, 11)]
    assert timeline.seconds == 15
    # At four times the speed a leaves in [3, 4), returns in [6, 7), and nothing waits.
    fast = simulate(STEP.program, STEP.costs, unit_machine(out=4, into=4), plan(swap))
    assert spans(fast, Lane.STALL) == []
    assert fast.seconds == 12


def test_memory_is_held_from_in_start_to_release():
    # f1 a; f2 a b; b; f3 b y + 5 of scratch; g3 b y t gb; y t gb a; g2 y t gb a gx; then the step is over
    swap = Swap(STEP.id("a"), "host", 0, 2, 2, 4, 4)
    timeline = simulate(STEP.program, STEP.costs, unit_machine(out=1e9, into=1e9), plan(swap))
    assert [nbytes for _, nbytes in timeline.memory] == [4, 7, 3, 9, 6, 7, 8, 0]
    assert timeline.peak_bytes == 9


@pytest.mark.parametrize(
    ("min_counted_bytes", "memory"),
    # As above: a alone has 4 bytes, and f3 has 5 of scratch.
    [(0, [4, 7, 3, 9, 6, 7, 8, 0]), (4, [4, 4, 0, 5, 0, 4, 4, 0]), (5, [0, 0, 0, 5, 0, 0, 0, 0])],
)
def test_buffers_below_the_counted_size_are_copied_and_hold_nothing(min_counted_bytes, memory):
    swap = Swap(STEP.id("a"), "host", 0, 2, 2, 4, 4)
    timeline = simulate(STEP.program, STEP.costs, unit_machine(), plan(swap), min_counted_bytes=min_counted_bytes)
    assert [nbytes for _, nbytes in timeline.memory] == memory
    assert spans(timeline, Lane.OUT) == [("a", 3, 7)]


def test_copies_of_one_lane_run_one_after_the_other_in_plan_order():
    step = build(
        """
        inference
        f1 1: x -> a b
        f2 1: a b -> c
        f3 9: c -> d
        f4 1: a d -> e
        f5 1: b e -> y
        """,
        sizes={"a": 2, "b": 3},
    )
    a, b = Swap(step.id("a"), "host", 0, 2, 3, 3, 3), Swap(step.id("b"), "host", 4096, 2, 3, 3, 4)
    # Out from 2: a [2, 4), b [4, 7), both under f3 [2, 11). In from 11: a to 13, b to 16. f4 [13, 14), f5 [16, 17).
    timeline = simulate(step.program, step.costs, unit_machine(), plan(a, b))
    assert spans(timeline, Lane.OUT) == [("a", 2, 4), ("b", 4, 7)]
    assert spans(timeline, Lane.IN) == [("a", 11, 13), ("b", 13, 16)]
    assert timeline.seconds == 17
    # b first: in b to 14, a to 16; f4 [16, 17), f5 [17, 18).
    assert simulate(step.program, step.costs, unit_machine(), plan(b, a)).seconds == 18


@pytest.mark.parametrize(
    ("both_factor", "b_bytes", "arrives"),
    # a, 2 s alone, is on its way in from 10; b has been leaving since 9, for as many seconds as it has bytes.
    [
        (1.0, 3, 12.0),  # full duplex: not at all delayed
        (0.75, 3, 13.0),  # at half its rate beside b: 1 of its 2 s done by 12, 1 to go
        (0.75, 9, 14.0),  # at half its rate all the way
        (0.5, 3, 14.0),  # half duplex: waits until b has left at 12, then 2 s
        (0.3, 3, 14.0),  # slower than taking turns: the lanes are taken to take turns
    ],
)
def test_copies_both_ways_share_what_the_link_moves(both_factor: float, b_bytes: int, arrives: float):
    step = build(
        """
        inference
        f1 1: x -> a
        f2 1: a -> c
        f3 7: c -> b
        f4 1: b -> d
        f5 1: d -> e
        f6 1: a e -> f
        f7 1: b f -> y
        """,
        sizes={"a": 2, "b": b_bytes},
    )
    a, b = Swap(step.id("a"), "host", 0, 2, 3, 4, 5), Swap(step.id("b"), "host", 4096, 3, 6, 6, 6)
    timeline = simulate(step.program, step.costs, unit_machine(both_factor=both_factor), plan(a, b))
    assert spans(timeline, Lane.OUT) == [("a", 2, 4), ("b", 9, 9 + b_bytes)]
    assert spans(timeline, Lane.IN)[0] == ("a", 10, arrives)


def test_copies_slow_down_while_compute_runs():
    link = Link(Rate.constant(2.0), Rate.constant(4.0), busy_factor=0.5)
    swap = Swap(STEP.id("a"), "host", 0, 2, 3, 3, 4)
    busy = unit_machine().with_link("host", link)
    same = unit_machine().with_link("host", Link(Rate.constant(1.0), Rate.constant(2.0)))
    assert simulate(STEP.program, STEP.costs, busy, plan(swap)) == simulate(STEP.program, STEP.costs, same, plan(swap))


def test_compute_is_slower_while_copies_run():
    # a leaves in [3, 7), while f3 does 2 of its 3 seconds' work; the third follows alone, to 8. a returns in [8, 12),
    # g3's 2 seconds of work take just as long. Then g2 runs alone.
    link = Link(Rate.constant(1.0), Rate.constant(1.0), compute_factor=0.5)
    swap = Swap(STEP.id("a"), "host", 0, 2, 3, 3, 4)
    timeline = simulate(STEP.program, STEP.costs, unit_machine().with_link("host", link), plan(swap))
    assert spans(timeline, Lane.COMPUTE) == [("f1", 0, 1), ("f2", 1, 3), ("f3", 3, 8), ("g3", 8, 12), ("g2", 12, 16)]
    assert spans(timeline, Lane.STALL) == []


def test_an_unknown_tier_is_refused():
    swap = Swap(STEP.id("a"), "tape", 0, 2, 3, 3, 4)
    with pytest.raises(OptionError, match="tape"):
        simulate(STEP.program, STEP.costs, unit_machine(), plan(swap))


# --- a host that queues ----------------------------------------------------------------------------------------------


def test_the_device_waits_for_a_host_that_is_slower():
    # a of 4 bytes leaves from 1 to 5 and is wanted back before g2. The host takes 2 s for an op, 3 for a copy.
    machine, swap = replace(unit_machine(), host=Host(2.0, 3.0)), Swap(STEP.id("a"), "host", 0, 1, 2, 3, 4)
    # Queued: f1 at 2, out at 5, f2 at 7, f3 at 9, in at 12, g3 at 14, g2 at 16.
    timeline = simulate(STEP.program, STEP.costs, machine, plan(swap))
    assert spans(timeline, Lane.HOST) == [("f1", 0, 2), ("a", 3, 5), ("f2", 5, 7), ("g3", 12, 14)]
    assert spans(timeline, Lane.OUT) == [("a", 5, 9)]
    # f2 [7, 9), then release at 9, f3 [9, 12); in from 12 to 16; g3 [14, 16) after its queueing.
    assert spans(timeline, Lane.COMPUTE) == [("f1", 2, 3), ("f2", 7, 9), ("f3", 9, 12), ("g3", 14, 16), ("g2", 16, 20)]


def test_a_host_that_is_ahead_costs_nothing():
    swap = Swap(STEP.id("a"), "host", 0, 1, 2, 3, 4)
    machine = replace(unit_machine(), host=Host(0.0, 0.5))
    assert simulate(STEP.program, STEP.costs, machine, plan(swap)) == simulate(
        STEP.program, STEP.costs, unit_machine(), plan(swap)
    )


@given(data=st.data(), step=steps(), machine=machines())
def test_a_step_takes_no_less_than_its_host_and_than_without_one(data, step, machine):
    made = data.draw(random_plans(step))
    host = machine.host or Host(0.0, 0.0)
    num_copies = sum(2 - (swap.out_start is None) for swap in made.swaps)
    timeline = simulate(step.program, step.costs, machine, made)
    assert timeline.seconds >= host.seconds(len(step.program.ops), num_copies) - 1e-9
    free = simulate(step.program, step.costs, replace(machine, host=None), made)
    assert timeline.seconds >= free.seconds - 1e-9
    assert [nbytes for _, nbytes in timeline.memory] == [nbytes for _, nbytes in free.memory]
    waits = timeline.lane_seconds(Lane.COMPUTE) + timeline.lane_seconds(Lane.STALL) + timeline.lane_seconds(Lane.HOST)
    assert waits == pytest.approx(max(timeline.memory)[0])
