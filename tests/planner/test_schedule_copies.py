"""Positions: slack for a slower link, copies that may serve twice, and ends of segments."""

from __future__ import annotations

import pytest

from lmswap.analyze.liveness import Gap
from lmswap.ir.plan import Plan
from lmswap.ir.timeline import Lane
from lmswap.planner import simulate
from lmswap.planner.schedule_copies import schedule_copies
from tests.instructions import counted_instructions
from tests.ir.build import build, unit_machine
from tests.planner.problems import problem_of


def positions(swaps):
    return [(swap.out_start, swap.release, swap.in_start, swap.first_use) for swap in swaps]


def test_a_link_a_tenth_slower_than_planned_for_stalls_nothing():
    # a, 9 bytes, has 40 ops of 1 s to leave and return. Copies take 9 s each, 10 s on the slower link.
    middle = "\n".join(f"m{i} 1: b -> b{i}" for i in range(40))
    step = build(f"inference\nf1 1: x -> a b\nf2 1: a -> c\n{middle}\ng1 1: a -> y", sizes={"a": 9}, outputs="y")
    swaps = schedule_copies(problem_of(step, 99), [Gap(step.id("a"), 1, 42)])
    assert positions(swaps) == [(2, 12, 32, 42)]
    plan = Plan("hand-made", 99, swaps, 0.0, 0)
    timeline = simulate(step.program, step.costs, unit_machine(out=0.9, into=0.9), plan)
    assert timeline.lane_seconds(Lane.STALL) < 1e-6


def test_a_host_copy_is_not_reused_in_a_segment_without_its_token():
    step = build(
        """
        forward
        f1 1: x -> a
        f2 1: x -> b
        f3 1: b -> c
        f4 1: a -> d
        f5 1: d -> y
        backward
        g0 1: t -> s
        g1 1: s a -> d2
        g2 1: d2 -> e
        g3 1: e -> f
        g4 1: a f -> gx
        """,
        outputs="y",
        tangents="t",
        gradients="gx",
    )
    a, fast = step.id("a"), problem_of(step, 99, unit_machine(out=8, into=8))
    forward, crossing, backward = Gap(a, 0, 3), Gap(a, 3, 6), Gap(a, 6, 9)
    preferred_starts = {gap: gap.before for gap in (forward, crossing, backward)}
    assert [
        s.out_start for s in schedule_copies(fast, [forward, crossing, backward], preferred_starts=preferred_starts)
    ] == [1, None, None]
    # Without the crossing, a reaches the backward function itself, and no token does.
    assert [s.out_start for s in schedule_copies(fast, [forward, backward], preferred_starts=preferred_starts)] == [
        1,
        7,
    ]


def test_an_unfinished_swap_out_is_cancelled_at_the_end_if_memory_is_free():
    step = build(
        """
        forward
        f1 1: x -> a
        f2 1: a -> b
        f3 1: b -> y
        backward
        g3 1: t -> c
        g2 1: b c -> d
        g1 1: a d -> gx
        """,
        sizes={"a": 9, "b": 9},
        outputs="y",
        tangents="t",
        gradients="gx",
    )
    gaps = [Gap(step.id("a"), 1, 5), Gap(step.id("b"), 2, 4)]
    # f3 ends at 3, the copies would at 12 and 22. g2 with both, a b y t c d, is 22 bytes: neither need go.
    assert schedule_copies(problem_of(step, 22), gaps) == ()
    # One byte less, and one must go: the one that is needed last.
    assert positions(schedule_copies(problem_of(step, 21), gaps)) == [(2, 3, 5, 5)]
    late = {gap: gap.before for gap in gaps}
    assert positions(schedule_copies(problem_of(step, 20), gaps, preferred_starts=late)) == [(2, 3, 5, 5)]
    assert len(schedule_copies(problem_of(step, 22), gaps, never_cancel=True)) == 2


def test_a_copy_in_waits_for_room():
    # m2, b d e, is 8 bytes and m3, e f, is 2: until then there is no room for a, whatever was wished.
    step = build(
        """
        inference
        f1 1: x -> a
        f2 1: a -> c
        f3 4: c -> b
        m1 1: b -> d
        m2 1: b d -> e
        m3 5: e -> f
        m4 1: a f -> y
        """,
        sizes={"a": 2, "b": 6},
        outputs="y",
    )
    swaps = schedule_copies(
        problem_of(step, 8), [Gap(step.id("a"), 1, 6)], preferred_starts={Gap(step.id("a"), 1, 6): 3}
    )
    assert positions(swaps) == [(2, 2, 5, 6)]
    roomy = schedule_copies(
        problem_of(step, 10), [Gap(step.id("a"), 1, 6)], preferred_starts={Gap(step.id("a"), 1, 6): 4}
    )
    assert positions(roomy) == [(2, 3, 4, 6)]


def test_release_waits_are_paid_only_under_pressure():
    text = "inference\nf1 1: x -> a\nf2 1: a -> b\nf3 1: b -> c\nf4 9: c -> d\nf5 9: d -> e\nf6 1: a e -> y"
    step = build(text, sizes={"a": 3, "b": 2, "c": 2})
    gap = Gap(step.id("a"), 1, 5)
    # a leaves from 2 on for 3.3 s. f3, a b c, is 7 bytes; f4, a c d, is 6; by f5 a has left.
    assert positions(schedule_copies(problem_of(step, 7), [gap], preferred_starts={gap: 5})) == [(2, 4, 5, 5)]
    assert positions(schedule_copies(problem_of(step, 6), [gap], preferred_starts={gap: 5})) == [(2, 2, 5, 5)]


def chain(length):
    forward = "\n".join(f"f{i} 1: {f'a{i - 1}' if i else 'x'} -> a{i}" for i in range(length))
    backward = "\n".join(f"g{i} 1: g{i + 1} a{i} -> g{i}" for i in reversed(range(length)))
    text = f"forward\n{forward}\nf 1: a{length - 1} -> y\nbackward\ng 1: t -> g{length}\n{backward}"
    return build(text, outputs="y", tangents="t", gradients="g0")


@pytest.mark.parametrize("link", [0.1, 0.5, 10.0])  # bytes per second beside ops of 1 s: how long copies queue up
def test_instructions_to_schedule_a_swap_do_not_grow_with_their_number(link):
    counted = {}
    for length in (1, 50, 400):
        problem = problem_of(chain(length), 10 * length, unit_machine(out=link, into=link))
        with counted_instructions() as counts:
            schedule_copies(problem, problem.gaps)
        counted[length] = counts[0]
    assert counted[400] <= 9 * counted[50]
