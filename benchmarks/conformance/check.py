"""Does a trial train under half of its memory to the same bits? Two or three trainings in this process → a `Finding`.

The first is the reference: lmswap's graphs with nothing swapped. The second gets half of what the first takes; where no
plan can do with that, since single operators need more, the least that one can. If that moves nothing, a third swaps
all that waits for the backward.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from benchmarks.conformance.memory import TensorMemory
from benchmarks.conformance.training import NothingTrains, Training, Way, train
from benchmarks.conformance.trial import Trial
from lmswap.errors import LmswapError, PlanInfeasible
from lmswap.hardware.first_calls import make_first_calls
from lmswap.reporting import Report

# "torch": it does not train in torch itself, or not twice to the same bits.
VERDICTS = ("passed", "torch", "refused", "failed")
_REFERENCE = Way("none")
# A step of several graphs says what it needs graph by graph, and as a whole once they are joined: after the first time
# the step gets more than it asks for.
_MOST_BUDGETS = 8
_GROWTH = 1.5
_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class Figures:
    """One training's step: what tensors took in it and what had been predicted, its time, and what was moved."""

    measured_bytes: int
    predicted_bytes: int
    seconds: float
    swapped_bytes: int
    recomputed_bytes: int

    @property
    def error(self) -> float:
        """By how much the prediction was off, as a share of what was measured."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Finding:
    """What came out of a trial; ``step_bytes`` is what its plan was given for the step."""

    verdict: str  # of VERDICTS
    reason: str = ""
    path: str = ""
    step_bytes: int | None = None
    before: Figures | None = None
    after: Figures | None = None
    notes: tuple[str, ...] = ()


def check(trial: Trial, memory: TensorMemory) -> Finding:
    """Trains the trial in all ways and compares."""
    make_first_calls()
    try:
        trial.make_model(), trial.make_call()
    except Exception as error:
        return Finding("failed", f"cannot be made: {_sentence(error)}")
    try:
        reference = train(trial, _REFERENCE, memory)
        planned = _train_in_half(trial, reference, memory)
        others = {"under its budget": planned}
        if not planned.report.swapped_out_bytes and not planned.report.recomputed_bytes:
            others["with all swapped"] = train(trial, Way("swap_all"), memory)
    except NothingTrains:
        return Finding("torch", "nothing that it gives has a gradient")
    except LmswapError as error:
        return _without_lmswap(trial, memory) or Finding("refused", _sentence(error))
    except Exception as error:  # any model may break in any way, and the others still have to run
        return _without_lmswap(trial, memory) or Finding("failed", f"{_sentence(error)} at {_origin(error)}")
    verdict, reason = _compare(reference, others)
    if reason and train(trial, _REFERENCE, memory).bits != reference.bits:
        verdict, reason = "torch", f"two runs without swapping differ too: {reason}"
    step_bytes = planned.report.budget_bytes - _beside_step(planned.report)
    return Finding(
        verdict, reason, planned.path, step_bytes, _figures(reference), _figures(planned), planned.report.notes
    )


def _train_in_half(trial: Trial, reference: Training, memory: TensorMemory) -> Training:
    beside_bytes = _beside_step(reference.report)
    # Without a plan for the whole step there is no prediction either.
    needed_bytes = _predicted_bytes(reference.report) or reference.activation_bytes
    budget_bytes = max(1, beside_bytes + needed_bytes // 2)
    for number in range(_MOST_BUDGETS):
        try:
            return train(trial, Way("auto", budget_bytes), memory)
        except PlanInfeasible as error:
            step_bytes = int(_GROWTH * (budget_bytes - beside_bytes)) if number else 1
            budget_bytes = max(error.needed_bytes, beside_bytes + step_bytes)
    return train(trial, Way("auto", budget_bytes), memory)


def _compare(reference: Training, others: dict[str, Training]) -> tuple[str, str]:
    for way, other in others.items():
        for step, (expected, found) in enumerate(zip(reference.bits, other.bits, strict=True), start=1):
            different = [name for name in expected | found if expected.get(name) != found.get(name)]
            if different:
                rest = f" and {len(different) - 1} more" if len(different) > 1 else ""
                return "failed", f"{way}, step {step}: other bits in {different[0]}{rest}"
    return "passed", ""


def _without_lmswap(trial: Trial, memory: TensorMemory) -> Finding | None:
    """What goes wrong without lmswap too, in torch alone."""
    try:
        first, second = (train(trial, Way(None), memory).bits for _ in range(2))
    except NothingTrains:
        return Finding("torch", "nothing that it gives has a gradient")
    except Exception as error:
        return Finding("torch", f"does not train in torch alone: {_sentence(error)}")
    if first != second:
        return Finding("torch", "two runs in torch alone differ")
    return None


def _figures(training: Training) -> Figures:
    report = training.report
    return Figures(
        training.activation_bytes,
        _predicted_bytes(report),
        training.step_seconds,
        report.swapped_out_bytes or 0,
        report.recomputed_bytes or 0,
    )


def _beside_step(report: Report) -> int:
    return report.base_bytes + report.reserve_bytes + report.margin_bytes


def _predicted_bytes(report: Report) -> int:
    if report.predicted_peak_bytes is None:
        return 0
    return report.predicted_peak_bytes - report.base_bytes - report.reserve_bytes


def _sentence(error: Exception) -> str:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line}"[:_REASON_CHARACTERS]


def _origin(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" not in frame.filename]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "its start"
