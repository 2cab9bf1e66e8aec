"""The topological levels that TFLMS plans with, by hand."""

from __future__ import annotations

from lmswap.planner.tflms import levels
from tests.ir.build import build


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
