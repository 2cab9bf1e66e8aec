"""Sets of half-open time intervals: union, clip, intersection, difference and length.

A set is an array of shape (n, 2): rows [start, end), sorted, disjoint and not touching, none empty; `union` makes one
of any rows. Every function is a sort or a search: O(n log n), a million kernels take about a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.float64]


def union(rows: npt.ArrayLike) -> Intervals:
    """Return the set that ``rows`` cover, in any order and overlap; empty and reversed ones cover nothing."""
    given = np.asarray(rows, dtype=np.float64).reshape(-1, 2)
    given = given[given[:, 1] > given[:, 0]]
    given = given[np.argsort(given[:, 0], kind="stable")]
    if not len(given):
        return given
    reach = np.maximum.accumulate(given[:, 1])
    begins = np.concatenate([[True], given[1:, 0] > reach[:-1]])  # rows that touch earlier ones are merged with them
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([given[begins, 0], reach[ends]], axis=1)


def clip(a: Intervals, start: float, end: float) -> Intervals:
    """Return the part of ``a`` within [start, end)."""
    return union(np.clip(a, start, end))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection."""
    return _combine(a, b, np.logical_and)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the part of ``a`` outside ``b``."""
    return _combine(a, b, lambda in_a, in_b: in_a & ~in_b)


def length(a: Intervals) -> float:
    """Return the total duration."""
    return float(np.sum(a[:, 1] - a[:, 0]))


def _combine(
    a: Intervals, b: Intervals, keep: Callable[[npt.NDArray[np.bool_], npt.NDArray[np.bool_]], npt.NDArray[np.bool_]]
) -> Intervals:
    """Cut time at every end of both sets; between two cuts each set covers everything or nothing."""
    cuts = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    kept = keep(_contains(a, cuts[:-1]), _contains(b, cuts[:-1]))
    return union(np.stack([cuts[:-1][kept], cuts[1:][kept]], axis=1))


def _contains(a: Intervals, times: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    if not len(a):
        return np.zeros(len(times), dtype=np.bool_)
    before = np.searchsorted(a[:, 0], times, side="right") - 1
    held: npt.NDArray[np.bool_] = (before >= 0) & (times < a[before, 1])
    return held
