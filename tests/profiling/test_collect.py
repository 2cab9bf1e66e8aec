"""Stalls by op and buffer, from handmade records; `tests.reporting.small_step` is the step."""

from dataclasses import replace
from types import SimpleNamespace

from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.profiling.collect import _merge_waits, _waits
from lmswap.profiling.trace import Stall, Trace, side_by_side
from lmswap.runtime._C import TransferRecord
from lmswap.runtime.step_record import NO_PEAKS, EndedStep, StepRecord
from tests.ir.build import build
from tests.reporting.small_step import PLAN, PROGRAM


def record(*transfers):
    return StepRecord(
        EndedStep(1, (), (), NO_PEAKS), (), (), tuple(TransferRecord(*transfer) for transfer in transfers)
    )


def waits(program, plan, *transfers):
    step = SimpleNamespace(merged=SimpleNamespace(program=program), plan=plan)
    return list(_waits(record(*transfers), step))


def out(buffer, queued, waited):
    return (buffer, False, 8, queued, queued, queued + 1, 5.0, 5.0 + waited)


def back(buffer, queued, waited):
    return (buffer, True, 8, queued, queued, queued + 1, 7.0, 7.0 + waited)


def test_a_wait_belongs_to_the_op_at_the_first_use_or_after_the_release():
    found = waits(PROGRAM, PLAN, back(1, 4.0, 0.5), out(1, 2.0, 0.25))
    assert found == [
        ("end of forward", "", "conv", Lane.OUT, 0.25),
        ("grad_x", "small.py:8 x = self.conv(x)", "conv", Lane.IN, 0.5),
    ]


def test_copies_that_nothing_waited_for_are_no_waits():
    assert waits(PROGRAM, PLAN, out(1, 2.0, 0.0), (1, True, 8, 4.0, 4.0, 5.0, 0.0, 0.0)) == []


SEVERAL = build(
    """
    forward
    f1 1: x -> a
    f2 1: a -> b
    f3 1: b -> c
    f4 1: a c -> y
    backward
    g1 1: t a -> gx
    """,
    outputs="y",
    tangents="t",
    gradients="gx",
)


def plan(*swaps, recomputes=()):
    return Plan("test", 0, swaps, 0.0, 0, recomputes=recomputes)


def test_swaps_of_one_buffer_are_distinguished_by_copy_order():
    a = SEVERAL.id("a")
    twice = plan(Swap(a, "disk", 0, 2, 2, 2, 3), Swap(a, "disk", 0, 4, 4, 4, 4))
    found = waits(SEVERAL.program, twice, out(a, 1, 1.0), back(a, 2, 2.0), out(a, 3, 3.0), back(a, 4, 4.0))
    assert [(op, lane, seconds) for op, _, _, lane, seconds in found] == [
        ("f3", Lane.OUT, 1.0),
        ("f4", Lane.IN, 2.0),
        ("end of forward", Lane.OUT, 3.0),
        ("g1", Lane.IN, 4.0),
    ]


def test_a_copy_that_is_still_good_does_not_leave_again():
    a = SEVERAL.id("a")
    again = plan(Swap(a, "disk", 0, 2, 2, 2, 3), Swap(a, "disk", 0, None, 3, 3, 3), Swap(a, "disk", 0, 4, 4, 4, 4))
    copies = (out(a, 1, 1.0), back(a, 2, 2.0), back(a, 3, 2.0), out(a, 4, 1.0), back(a, 5, 2.0))
    found = waits(SEVERAL.program, again, *copies)
    assert [op for op, *_ in found] == ["f3", "f4", "f4", "end of forward", "g1"]


def test_a_copy_that_the_plan_does_not_have_waits_at_no_known_op():
    a = SEVERAL.id("a")
    found = waits(SEVERAL.program, plan(Swap(a, "disk", 0, 2, 2, 2, 3)), back(a, 1, 1.0), back(a, 2, 2.0))
    assert [op for op, *_ in found] == ["f4", "unknown: replanned"]


def test_recomputed_buffers_are_named_after_the_buffers_that_they_replace():
    # f2 is recomputed before g1: positions from there on are one later, and what it makes is a buffer of its own.
    b, remade = SEVERAL.id("b"), len(SEVERAL.program.buffers)
    again = plan(Swap(remade, "disk", 0, 5, 5, 5, 5), recomputes=(Recompute(SEVERAL.op("f2"), 4),))
    (found,) = waits(SEVERAL.program, again, back(b, 4, 1.0))
    assert found == ("g1", "test.py:5 g1", "b", Lane.IN, 1.0)


def test_waits_are_summed_over_steps_longest_first():
    waited = [("f", "a.py:1", "x", Lane.IN, 1.0), ("g", "", "y", Lane.OUT, 3.0), ("f", "a.py:1", "x", Lane.IN, 1.5)]
    assert _merge_waits(iter(waited)) == (
        Stall("g", "", "y", Lane.OUT, 1, 3.0),
        Stall("f", "a.py:1", "x", Lane.IN, 2, 2.5),
    )


def test_under_an_emulated_link_own_records_replace_a_tools_copies():
    kernel, stall = Span(Lane.COMPUTE, "conv", 0.0, 2.0), Span(Lane.STALL, "wait", 2.0, 3.0)
    batch = Span(Lane.IN, "copy in", 0.0, 0.1, 2**21, is_pageable=True)
    chunks = [Span(Lane.OUT, "copy out", start, start + 0.1, 2**20) for start in (0.0, 1.0, 2.0)]
    whole, graph = Span(Lane.OUT, "x", 0.5, 3.0, 3 * 2**20), Span(Lane.COMPUTE, "forward 0", 0.0, 3.0)
    steps = (Step(0, 0.0, 4.0),)
    seen = Trace("Kineto", "GPU 0: NVIDIA H200", Timeline("Kineto", (kernel, batch, *chunks), (), steps))
    other = replace(seen, device="GPU 1: NVIDIA H200")
    own = Trace("own", "cuda:0 (NVIDIA H200)", Timeline("own", (graph, whole, stall), (), steps))
    assert side_by_side([seen, other], [own]) == (seen, other, own)
    emulated = replace(own, emulated_link="10 GB/s")
    merged, untouched, last = side_by_side([seen, other], [emulated])
    assert merged.timeline.spans == (kernel, batch, whole, stall)
    assert merged.emulated_link == "10 GB/s"
    assert (untouched, last) == (other, emulated)
