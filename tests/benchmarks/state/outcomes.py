"""Outcomes that were not measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.state.training import StateOutcome
from benchmarks.weights.outcomes import Outcome
from tests.benchmarks.weights import outcomes as weights

PEAKS = {"first step": 2**29, "steps": 2**30, "save": 2**30, "load": 2**30}
_OF_STATE = {"state_bytes": 2**28, "update_seconds": (0.1, 0.2, 0.3)}


def _with_state(outcome: Outcome, **changes: Any) -> StateOutcome:
    """``outcome``, of the weights benchmark, as one of this."""
    changes = {"run": replace(outcome.run, task="gpt"), **_OF_STATE, **changes}
    return StateOutcome(**{**vars(outcome), **changes})


PLAIN = _with_state(weights.PLAIN, peaks=PEAKS)
LMSWAP = _with_state(
    weights.LMSWAP,
    seconds=(1.1, 2.2, 3.3),
    report={**weights.REPORT, "bound_seconds": 1.0},
    peaks=dict.fromkeys(PEAKS, 2**28),
)
