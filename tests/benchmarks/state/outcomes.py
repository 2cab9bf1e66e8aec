"""Outcomes that were not measured."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.state.training import StateOutcome
from benchmarks.weights.outcomes import Run
from tests.benchmarks.weights.outcomes import REPORT

PEAKS = {"first step": 2**29, "steps": 2**30, "save": 2**30, "load": 2**30}
PLAIN = StateOutcome(
    Run("gpt", "tiny", None, "plain", "cpu"),
    "ran",
    peak_bytes=2**30,
    seconds=(1.0, 2.0, 3.0),
    read_bytes=0.0,
    bits=("a", "b", "c"),
    trained="t",
    peaks=PEAKS,
    state_bytes=2**28,
    update_seconds=(0.1, 0.2, 0.3),
)
LMSWAP = replace(
    PLAIN,
    run=replace(PLAIN.run, way="lmswap", budget_bytes=2**29),
    peak_bytes=2**28,
    seconds=(1.1, 2.2, 3.3),
    read_bytes=2**27,
    report={**REPORT, "bound_seconds": 1.0},
    peaks=dict.fromkeys(PEAKS, 2**28),
)
