"""The tables, and what counts as a failure of lmswap's own."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks.weights import results
from benchmarks.weights.table import lines
from tests.benchmarks.weights.outcomes import LMSWAP, PLAIN

OTHER = replace(LMSWAP, run=replace(LMSWAP.run, way="block swap", num_blocks=3), bits=("a", "x", "c"), report={})
REFUSED = replace(LMSWAP, status="infeasible", detail="needs 600 MiB", peak_bytes=None, seconds=(), report={})


def test_ways_are_compared_with_plain_torch_turn_by_turn():
    text = "\n".join(lines({"decoder": [asdict(each) for each in (PLAIN, PLAIN, LMSWAP, OTHER, REFUSED)]}))
    for part in (
        "| decoder | plain | 1.00 GiB | – | 2.000 | – | 0 B | – |",
        "| decoder | plain, again | 1.00 GiB | – | 2.000 | 1.000 × | 0 B | same |",
        "| decoder | lmswap | 256.00 MiB | 0.500 | 2.400 | 1.200 × | 128.00 MiB | same |",
        "| decoder | block swap, 3 blocks | 256.00 MiB | 0.500 | 2.400 | 1.200 × | 128.00 MiB | others from step 2 ",
        "| decoder | lmswap | infeasible: needs 600 MiB | ",
        "| decoder | 256.00 MiB | 256.00 MiB | 2.000 | 2.100 | 2.000 | 1.050 × |",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "is_broken"),
    [
        ({}, False),
        ({"status": "infeasible"}, False),
        ({"status": "failed"}, True),
        ({"bits": ("a", "b", "x")}, True),
        ({"trained": "x"}, True),
        ({"peak_bytes": 2**29 + 1}, True),
    ],
)
def test_other_bits_and_an_exceeded_budget_are_failures_of_lmswap(changes, is_broken):
    others = [asdict(replace(OTHER, status="failed"))]  # may break
    assert results.is_broken([asdict(PLAIN), asdict(replace(LMSWAP, **changes)), *others]) is is_broken


def test_without_plain_torch_nothing_can_be_compared():
    assert results.is_broken([asdict(replace(PLAIN, status="failed")), asdict(LMSWAP)])
