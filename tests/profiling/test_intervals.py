"""Interval algebra against sets of integers: [start, end) stands for the integers in it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmswap.profiling.intervals import clip, intersect, length, subtract, union

rows = st.lists(st.tuples(st.integers(-3, 25), st.integers(-3, 25)), max_size=12)


def members(intervals):
    return {point for start, end in np.asarray(intervals).reshape(-1, 2) for point in range(int(start), int(end))}


def is_normal(intervals):
    flat = intervals.ravel()
    return bool(np.all(flat[1:] > flat[:-1]))


@given(rows)
def test_union_covers_its_rows_without_overlap_or_touch(a):
    assert members(union(a)) == members(a)
    assert is_normal(union(a))


@given(rows, rows)
def test_interval_operations_equal_set_operations(a, b):
    left, right = union(a), union(b)
    for found, expected in (
        (intersect(left, right), members(a) & members(b)),
        (subtract(left, right), members(a) - members(b)),
    ):
        assert members(found) == expected
        assert is_normal(found)
        assert length(found) == len(expected)


@given(rows, st.integers(-3, 25), st.integers(0, 28))
def test_clipping_is_intersection_with_the_window(a, start, size):
    window = range(start, start + size)
    assert members(clip(union(a), start, start + size)) == members(a) & set(window)


def test_a_million_kernels_are_no_problem():  # anything quadratic would run into the test's time limit
    starts = np.arange(1_000_000) * 2.0
    kernels, copies = union(np.stack([starts, starts + 1], axis=1)), union(np.stack([starts + 0.5, starts + 1.5], 1))
    assert length(intersect(kernels, copies)) == length(subtract(copies, kernels)) == 500_000
