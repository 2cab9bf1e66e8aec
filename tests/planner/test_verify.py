"""Each rule of the verifier, broken on purpose in a plan that is valid otherwise."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.analyze.repeatable import exposed_buffers, repeatable_ops
from lmswap.errors import PlanInvalid
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.ir.program import BufferKind
from lmswap.planner import simulate, verify
from lmswap.planner.verify import unguarded_buffers
from tests.ir.build import build, unit_machine
from tests.ir.strategies import machines, steps
from tests.planner.random_swaps import random_plans

# a is idle in f3 and f4, then a and b until g1 and g2; c is written again in backward; two graphs make the step.
STEP = build(
    """
    forward 0
    f1 1: x -> a
    f2 1: a -> b
    f3 1: b -> c s
    f4 1: b -> d
    f5 1: a d c -> y
    forward 1
    h1 1: y -> e
    h2 1: e -> z
    backward 1
    i2 1: tz e -> gy
    backward 0
    g5 1: ty c -> c
    g4 1: c d -> gd
    g3 1: s gd -> gc
    g2 1: b c d gc -> gb
    g1 1: a gb -> gx
    """,
    sizes={"a": 5000, "b": 4096, "c": 10, "s": 10, "e": 10},
    outputs="y z",
    tangents="ty tz",
    gradients="gx gy",
)
A, B, C, D = (STEP.id(name) for name in "abcd")
#                 0   1   2   3   4 | 5   6 | 7 | 8   9   10  11  12
#                 f1  f2  f3  f4  f5  h1  h2  i2  g5  g4  g3  g2  g1
MACHINE = unit_machine(capacity=2**14)


def unpredicted(swaps):
    return Plan("hand-made", 2**20, tuple(swaps), 1.0, 0, {"host": 2**14})


def make_plan(*swaps, **changes):
    plan = unpredicted(swaps)
    peak_bytes = simulate(STEP.program, STEP.costs, MACHINE, plan).peak_bytes
    return replace(plan, predicted_peak_bytes=peak_bytes, **changes)


def swap(buffer, out_start, release, in_start, first_use, *, offset=0):
    return Swap(buffer, "host", offset, out_start, release, in_start, first_use)


IN_FORWARD = swap(A, 2, 3, 3, 4)
CROSSING_A = swap(A, 5, 5, 9, 12)
AGAIN_A = swap(A, None, 5, 9, 12)
CROSSING_B = swap(B, 4, 5, 8, 11, offset=8192)
VALID = (IN_FORWARD, CROSSING_B, AGAIN_A)


def check(*swaps, **changes):
    verify(STEP.program, STEP.costs, MACHINE, make_plan(*swaps, **changes))


def test_the_plans_that_are_broken_below_are_valid():
    check(*VALID)
    check(IN_FORWARD, CROSSING_B, CROSSING_A)
    check()


def test_between_two_copies_of_a_buffer_its_offset_is_reusable():
    check(swap(C, 3, 3, 4, 4), swap(D, 5, 5, 8, 9), swap(C, 10, 10, 10, 11))


@pytest.mark.parametrize(
    ("rule", "swaps"),
    {
        "a buffer that does not exist": ("buffers", [swap(99, 1, 2, 3, 4)]),
        "an output is swapped": ("buffers", [swap(STEP.id("y"), 5, 5, 5, 5)]),
        "a parameter or input is swapped": ("buffers", [swap(STEP.id("x"), 1, 2, 3, 4)]),
        "a tangent is swapped": ("buffers", [swap(STEP.id("ty"), 9, 9, 9, 9)]),
        "a gradient is swapped": ("buffers", [swap(STEP.id("gy"), 8, 8, 8, 8)]),
        "an unknown tier": ("buffers", [replace(IN_FORWARD, tier="disk2")]),
        "released before its copy starts": ("order", [replace(IN_FORWARD, out_start=3, release=2)]),
        "back before it is released": ("order", [replace(CROSSING_B, in_start=4)]),
        "used before its copy in starts": ("order", [replace(CROSSING_B, in_start=11, first_use=10)]),
        "a position after the end": ("order", [replace(CROSSING_A, first_use=13)]),
        "a position before the start": ("order", [replace(IN_FORWARD, out_start=-1)]),
        "away at a use": ("residency", [swap(A, 2, 3, 8, 12)]),
        "arrives after its use": ("residency", [replace(CROSSING_B, first_use=12)]),
        "released before it exists": ("residency", [swap(B, 0, 1, 1, 1)]),
        "swapped in after its last use": ("residency", [swap(B, 12, 12, 12, 12)]),
        "written after the copy out": ("copy", [swap(STEP.id("c"), 5, 10, 10, 11)]),
        "copied out before it is made": ("copy", [swap(A, 0, 3, 3, 4)]),
        "no copy to swap in from": ("copy", [replace(CROSSING_A, out_start=None)]),
        "its copy lies elsewhere": ("copy", [IN_FORWARD, replace(AGAIN_A, offset=8192)]),
        "swapped twice at once": ("overlap", [swap(B, 4, 5, 8, 10), replace(CROSSING_B, out_start=5)]),
        "released in another segment than used": ("segments", [replace(CROSSING_B, release=6)]),
        "swapped in in another segment": ("segments", [replace(CROSSING_B, in_start=7)]),
        "out in another segment than used": ("segments", [swap(D, 4, 10, 10, 11)]),
        "its copy is in another function": ("segments", [swap(D, 4, 4, 4, 4), swap(D, None, 10, 10, 11)]),
        "listed against the order of need": ("lanes", [IN_FORWARD, CROSSING_A, CROSSING_B]),
        "place is not on a page": ("tier", [replace(CROSSING_B, offset=512)]),
        "place is negative": ("tier", [replace(CROSSING_B, offset=-4096)]),
        "place is beyond the capacity": ("tier", [replace(CROSSING_B, offset=2**14)]),
        "two buffers share a place": ("tier", [IN_FORWARD, replace(CROSSING_B, offset=4096), AGAIN_A]),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_is_found(rule: str, swaps):
    with pytest.raises(PlanInvalid) as found:
        verify(STEP.program, STEP.costs, MACHINE, unpredicted(swaps))
    assert found.value.rule == rule


ADJACENT = build(
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
    outputs="y",
    tangents="t",
    gradients="gx",
)


@pytest.mark.parametrize(
    ("out_start", "release", "is_valid"), [(2, 3, True), (2, 5, True), (3, 4, True), (4, 5, False)]
)
def test_a_backward_may_wait_for_copies_queued_by_its_forward(out_start, release, is_valid):
    plan = unpredicted([swap(ADJACENT.id("a"), out_start, release, 5, 5)])
    timeline = simulate(ADJACENT.program, ADJACENT.costs, MACHINE, plan)
    plan = replace(plan, predicted_peak_bytes=timeline.peak_bytes)
    if is_valid:
        verify(ADJACENT.program, ADJACENT.costs, MACHINE, plan)
        return
    with pytest.raises(PlanInvalid) as found:
        verify(ADJACENT.program, ADJACENT.costs, MACHINE, plan)
    assert found.value.rule == "segments"


def test_an_activation_of_two_graphs_cannot_be_passed_between_them():
    step = build("forward 0\nf1 1: x -> a\nf2 1: a -> b\nforward 1\nf3 1: b -> c\nf4 1: c a -> y", outputs="y")
    plan = Plan("hand-made", 99, (swap(step.id("a"), 2, 2, 3, 3),), 1.0, 4, {"host": 4096})
    with pytest.raises(PlanInvalid, match="passes nothing to") as found:
        verify(step.program, step.costs, MACHINE, plan)
    assert found.value.rule == "segments"


def test_the_budget_is_checked_at_every_op():
    peak_bytes = make_plan(*VALID).predicted_peak_bytes
    check(*VALID, budget_bytes=peak_bytes)
    with pytest.raises(PlanInvalid) as found:
        check(*VALID, budget_bytes=peak_bytes - 1)
    assert found.value.rule == "capacity"


def test_a_copy_in_counts_from_its_start():
    # a and b are together in f2 only, 9096 bytes, unless a is swapped in before g2, which needs b.
    apart = (swap(A, 2, 2, 4, 4), replace(CROSSING_B, release=4))
    late, early = replace(AGAIN_A, in_start=12), replace(AGAIN_A, in_start=11)
    check(*apart, late, budget_bytes=9096)
    with pytest.raises(PlanInvalid) as found:
        check(*apart, early, budget_bytes=9096)
    assert (found.value.rule, found.value.op) == ("capacity", 11)


def test_a_wrong_prediction_is_found():
    for changes in ({"predicted_peak_bytes": 1}, {"predicted_seconds": float("nan")}, {"predicted_seconds": -1.0}):
        plan = replace(make_plan(*VALID), **changes)
        with pytest.raises(PlanInvalid) as found:
            verify(STEP.program, STEP.costs, MACHINE, plan)
        assert found.value.rule == "prediction"


def test_a_tier_that_is_too_small_is_found():
    with pytest.raises(PlanInvalid) as found:
        check(*VALID, tier_bytes={"host": 2**15})
    assert found.value.rule == "tier"


@pytest.mark.parametrize(
    ("made", "saved", "is_allowed"),
    {
        "of the batch": ("x", "", False),
        "of the batch, which the backward reads": ("x", "x", True),
        "of a parameter": ("W", "", True),
        "of an output": ("h", "", False),
        "of an output, which the backward reads": ("h", "h", True),
        "of what the step makes beside the device": ("n", "", True),
    }.values(),
    ids=str,
)
def test_a_recompute_reads_nothing_that_the_caller_may_have_written(made, saved, is_allowed):
    text = f"forward\nf1 1: x -> h n\nf2 1: {made} -> a\nf3 1: a -> y\nbackward\ng2 1: t a {saved} -> gx"
    step = build(text, outputs="h y", tangents="t", gradients="gx")
    buffers = [replace(b, kind=BufferKind.INPUT) if b.id == step.id("n") else b for b in step.program.buffers]
    program = replace(step.program, buffers=tuple(buffers))
    plan = Plan("hand-made", 99, (), 1.0, 0, recomputes=(Recompute(step.op("f2"), step.op("g2")),))
    plan = replace(plan, predicted_peak_bytes=simulate(program, step.costs, MACHINE, plan).peak_bytes)
    assert repeatable_ops(program)[step.op("f2")] == is_allowed
    with nullcontext() if is_allowed else pytest.raises(PlanInvalid, match="the caller may have written") as found:
        verify(program, step.costs, MACHINE, plan)
    assert is_allowed or found.value.rule == "recomputes"


def test_a_step_without_backward_may_recompute_readers_of_the_batch():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> b\nf3 1: b a -> y", outputs="y")
    assert repeatable_ops(step.program)[0]
    verify(step.program, step.costs, MACHINE, Plan("hand-made", 99, (), 1.0, 3, recomputes=(Recompute(0, 2),)))


@given(steps())
def test_planners_and_verifier_agree_on_what_the_caller_may_write(step):
    assert exposed_buffers(step.program) == unguarded_buffers(step.program)


@given(steps().flatmap(lambda step: st.tuples(st.just(step), random_plans(step))), machines())
def test_valid_random_plans_are_accepted_with_the_simulated_peak(case, machine):
    step, plan = case
    peak_bytes = simulate(step.program, step.costs, machine, plan).peak_bytes
    verify(step.program, step.costs, machine, replace(plan, predicted_peak_bytes=peak_bytes))


class _Counted(int):
    """A number that counts how often any of its kind is compared."""

    num_compared = 0

    def _compare(self, other: int, compare: Callable[[int, int], bool]) -> bool:
        _Counted.num_compared += 1
        return compare(int(self), int(other))

    __eq__ = partialmethod(_compare, compare=operator.eq)
    __lt__ = partialmethod(_compare, compare=operator.lt)
    __ge__ = partialmethod(_compare, compare=operator.ge)
    __hash__ = int.__hash__


def test_copies_at_disjoint_offsets_are_not_compared_in_pairs():
    count = 200
    forward = "\n".join(f"f{n} 1: x -> a{n}" for n in range(count))
    backward = "\n".join(f"g{n} 1: a{n} t -> b{n}" for n in reversed(range(count)))
    step = build(f"forward\n{forward}\nbackward\n{backward}", tangents="t")
    swaps = []
    for n in reversed(range(count - 1)):
        buffer, back = _Counted(step.id(f"a{n}")), step.op(f"g{n}")
        swaps.append(swap(buffer, n + 1, n + 1, back, back, offset=_Counted(4096 * n)))
    plan = Plan("hand-made", 2**20, tuple(swaps), 1.0, 0, {"host": 4096 * count})
    machine = unit_machine(capacity=4096 * count)
    peak_bytes = simulate(step.program, step.costs, machine, plan).peak_bytes
    _Counted.num_compared = 0
    verify(step.program, step.costs, machine, replace(plan, predicted_peak_bytes=peak_bytes))
    assert count < _Counted.num_compared < count**2 // 4  # sorted, not each with each
