"""The memory curve and its lower bounds, by hand and against a count done the slow way."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from lmswap.analyze.liveness import live_ranges
from lmswap.analyze.memory import Peak, StepMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import BufferKind, Program
from tests.ir.build import build
from tests.ir.strategies import steps

STEP = build(
    """
    forward
    f1 1: x -> a
    f2 2: a -> b
    f3 4: b -> y
    backward
    g3 8: t b -> c
    g2 16: a c -> gx
    """,
    sizes={"a": 4, "b": 3, "c": 2, "x": 100},
    scratch={"f3": 5},
    outputs="y",
    tangents="t",
    gradients="gx",
)


def test_inputs_outputs_and_scratch_are_there_while_an_op_runs():
    memory = StepMemory(STEP.program, STEP.costs)
    # f1 a; f2 a b; f3 a b y + 5; g3 a b y t c; g2 a y t c gx
    assert memory.curve.tolist() == [4, 7, 13, 11, 9]
    assert memory.peak == Peak(13, 2, (("scratch of f3", 5), ("a", 4), ("b", 3), ("y", 1)))


def test_buffers_below_the_counted_size_are_not_in_the_curve():
    # f1 a; f2 a b; f3 a b + 5; g3 a b; g2 a
    assert StepMemory(STEP.program, STEP.costs, 3).curve.tolist() == [4, 7, 12, 7, 4]


@given(steps())
def test_the_curves_of_all_kinds_add_up_to_that_of_the_step(step):
    memory = StepMemory(step.program, OpCosts(step.costs.seconds, (0,) * len(step.program.ops), "unit"))
    by_kind = [replace(memory, counted_kind=kind).curve for kind in BufferKind]
    assert sum(by_kind).tolist() == memory.curve.tolist()


def test_the_floor_counts_used_and_unswappable_buffers():
    memory = StepMemory(STEP.program, STEP.costs)
    # As above, without a in f3 and g3.
    assert memory.floor.tolist() == [4, 7, 9, 7, 9]
    assert memory.peak_of(memory.floor) == Peak(9, 2, (("scratch of f3", 5), ("b", 3), ("y", 1)))


def test_starts_are_sums_of_seconds():
    assert StepMemory(STEP.program, STEP.costs).op_starts == [0, 1, 3, 7, 15, 31]


def test_a_program_without_ops_needs_nothing():
    memory = StepMemory(Program("empty", (), (), (), ()), OpCosts((), (), "unit"))
    assert memory.peak == memory.peak_of(memory.floor) == Peak(0, 0, ())


@given(steps())
def test_the_curve_is_the_sum_of_live_buffers_and_the_floor_is_below_it(step):
    memory = StepMemory(step.program, step.costs)
    ranges = live_ranges(step.program).values()
    for op in step.program.ops:
        live = [found.buffer for found in ranges if found.start <= op.index < found.stop]
        expected = sum(step.program.buffers[buffer].nbytes for buffer in live) + step.costs.scratch_bytes[op.index]
        assert memory.curve[op.index] == expected
    assert (memory.floor <= memory.curve).all()
    assert memory.peak_of(memory.floor).nbytes <= memory.peak.nbytes
    for peak in (memory.peak, memory.peak_of(memory.floor)):
        assert sum(nbytes for _, nbytes in peak.live) == peak.nbytes


@given(steps())
def test_without_swappable_buffers_floor_and_curve_are_one(step):
    everything = tuple(replace(b, kind="output") if b.is_swappable else b for b in step.program.buffers)
    memory = StepMemory(replace(step.program, buffers=everything), step.costs)
    assert (memory.floor == memory.curve).all()
