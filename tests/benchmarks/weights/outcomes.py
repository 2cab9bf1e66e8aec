"""Outcomes that were not measured."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.weights.outcomes import Outcome, Run

PLAIN = Outcome(
    Run("decoder", "tiny", None, "plain", "cpu"),
    "ran",
    peak_bytes=2**30,
    seconds=(1.0, 2.0, 3.0),
    read_bytes=0.0,
    bits=("a", "b", "c"),
    trained="t",
)
REPORT = {
    "predicted_peak_bytes": 2**28,
    "measured_peak_bytes": 2**28,
    "predicted_seconds": 2.0,
    "measured_seconds": 2.1,
    "bound_seconds": 2.0,
}
LMSWAP = replace(
    PLAIN,
    run=replace(PLAIN.run, way="lmswap", budget_bytes=2**29),
    peak_bytes=2**28,
    seconds=(1.1, 2.4, 3.6),
    read_bytes=2**27,
    report=REPORT,
)
