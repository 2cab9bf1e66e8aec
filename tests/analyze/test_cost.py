"""Estimated costs, by hand."""

from __future__ import annotations

from dataclasses import replace

from lmswap.analyze.cost import roofline, unit
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
