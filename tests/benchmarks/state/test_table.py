"""The tables, and which goals are reached."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks.state.table import goals, lines
from tests.benchmarks.state.outcomes import LMSWAP, PLAIN

MOVED = replace(PLAIN, run=replace(LMSWAP.run, way="moved state", num_blocks=3), peaks={"steps": 2**28})


def records(*outcomes):
    return [asdict(each) for each in outcomes]


def test_phases_and_goals_have_tables():
    text = "\n".join(lines({"gpt": records(PLAIN, PLAIN, LMSWAP, MOVED)}))
    for part in (
        "| gpt | plain, again | 1.00 GiB | – | 2.000 | 1.000 × | 0 B | same |",
        "| gpt | moved state, 3 blocks | ",
        "| gpt | plain | 512.00 MiB | 1.00 GiB | 1.00 GiB | 1.00 GiB | 0.200 |  |",
        "| gpt | moved state | – | 256.00 MiB | – | – | 0.200 | without overlap |",
        "| gpt | same | 0.500 | 1.100 × | 1.000 × | reached |",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"bits": ("a", "b", "x")}, ["bits"]),
        ({"trained": "x"}, ["bits"]),
        ({"peaks": {"first step": 2**28, "steps": 2**28, "load": 2**29 + 1}}, ["peak"]),
        ({"seconds": (1.2, 2.4, 3.6)}, ["seconds"]),
        ({"seconds": (1.2, 2.4, 3.6), "report": {**LMSWAP.report, "bound_seconds": 1.1}}, []),  # within the bound
        # Of a training state of 512 MiB an update copies in 256: in 0.4 s.
        (
            {"seconds": (1.2, 2.4, 3.6), "run": replace(LMSWAP.run, budget_bytes=2**28, bytes_per_second=2**28 / 0.4)},
            [],
        ),
        ({"seconds": (1.2, 2.4, 3.6), "report": {**LMSWAP.report, "bound_seconds": None}}, ["seconds"]),
    ],
)
def test_goals_are_bits_every_peak_and_seconds(changes, missed):
    assert goals(records(PLAIN, replace(LMSWAP, **changes))).missed == missed


def test_goals_need_outcomes_of_both():
    assert goals(records(PLAIN)) is None
    assert goals(records(replace(PLAIN, status="failed"), LMSWAP)) is None
