"""The figures of a report for experiment trackers, and their names."""

from __future__ import annotations

from lmswap.reporting.step import StepFigures

PREFIX = "lmswap/"
FIELDS = {
    "peak_bytes": "measured_peak_bytes",
    "highest_peak_bytes": "highest_peak_bytes",
    "predicted_peak_bytes": "predicted_peak_bytes",
    "budget_bytes": "budget_bytes",
    "step_seconds": "measured_seconds",
    "predicted_step_seconds": "predicted_seconds",
    "stall_seconds": "stall_seconds",
    "host_bound_seconds": "host_bound_seconds",
    "own_seconds": "own_seconds",
    "swapped_out_bytes": "swapped_out_bytes",
    "swapped_in_bytes": "swapped_in_bytes",
    "recomputed_bytes": "recomputed_bytes",
    "out_bytes_per_second": "out_bytes_per_second",
    "in_bytes_per_second": "in_bytes_per_second",
    "tier_peak_bytes": "tier_peak_bytes",
}


def metrics_of(step: StepFigures, prefix: str) -> dict[str, int | float]:
    """Return the figures known so far, each under ``prefix`` and its name."""
    figures = {prefix + name: getattr(step, field) for name, field in FIELDS.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}
