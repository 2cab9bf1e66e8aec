"""Estimated costs, and graph levels, by hand."""

from __future__ import annotations

from dataclasses import replace

from lmswap.analyze.cost import roofline, unit
from lmswap.analyze.levels import levels
from lmswap.ir.costs import OpCosts
from tests.ir.build import build, unit_machine


def test_roofline_charges_the_worst_of_compute_traffic_and_launch():
    step = build("inference\nc 0: x w -> a\nv 0!view: a ->\nr 0: a -> b\ns 0: u -> e", sizes={"x": 6, "a": 4, "b": 4})
    ops = step.program.ops
    program = replace(step.program, ops=(replace(ops[0], flops=1000), *ops[1:]))
    machine = replace(unit_machine(), flops_per_second=10.0, bytes_per_second=2.0, op_seconds=3.0)
    # c: 1000 flop at 10 a second, though 11 bytes take only 5.5 s; v: a view; r: 8 bytes at 2 a second; s: launch.
    assert roofline(program, machine) == OpCosts((100.0, 0.0, 4.0, 3.0), (0, 0, 0, 0), "roofline")


def test_unit_costs_are_one_second_an_op():
    step = build("inference\nf 9: x -> a\ng 9: a -> b")
    assert unit(step.program) == OpCosts((1.0, 1.0), (0, 0), "unit")


def test_a_level_is_the_longest_path_to_an_op():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> b\nf3 1: x -> c\nf4 1: b c -> d\nf5 1: c -> e")
    assert levels(step.program) == (0, 1, 0, 2, 1)


def test_a_tangent_is_one_level_below_all_earlier_segments():
    step = build(
        """
        forward
        f1 1: x -> a
        f2 1: a -> b
        f3 1: b -> y
        backward
        g3 1: t -> c
        g2 1: b c -> d
        g0 1: b -> e
        """,
        outputs="y",
        tangents="t",
    )
    # f1 0, f2 1, f3 2; g3 follows all of them; g0 reads only b, which f2 makes.
    assert levels(step.program) == (0, 1, 2, 3, 4, 2)


def test_a_read_after_a_second_write_depends_on_that():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> b\nf3 1: b -> a\nf4 1: a -> y")
    assert levels(step.program) == (0, 1, 2, 3)
