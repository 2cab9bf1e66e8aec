"""Notebook representations of values are one line, for steps of any size."""

import pytest

from tests.ir.build import build
from tests.reporting.small_step import PLAN, PROGRAM, report, timeline

COUNT = 300
LARGE = build("forward\n" + "\n".join(f"f{n} 1: b{n} -> b{n + 1}" for n in range(COUNT))).program


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (LARGE, "<program test: 300 ops, 301 buffers; print it, or see its fields>"),
        (
            PLAN,
            "<plan by policy 'swap_all' (swaps: 1, recomputes: 0, 7.00 MiB of 8.00 MiB for the step's tensors, 5.5 s); "
            "print it, or see its fields>",
        ),
        (PLAN.certificate, "<certificate of 5 s, by 0 cuts; see its fields>"),
        (timeline("predicted"), "<predicted timeline of 5.5 s: 8 spans, 5 points of memory; see its fields>"),
        (report(), "<report of Small after 3 steps; print it, or see its fields>"),
    ],
    ids=["program", "plan", "certificate", "timeline", "report"],
)
def test_large_values_are_represented_by_one_line(value, line):
    assert repr(value) == line


def test_programs_and_plans_print_in_full():
    assert len(str(LARGE).splitlines()) == COUNT + 2  # and two headings
    assert str(PLAN).splitlines()[1:] == ["  buffer 1 to disk: out from 2, released at 3, in from 3 to 4"]
    assert "small.py:8 x = self.conv(x)" in str(PROGRAM)
