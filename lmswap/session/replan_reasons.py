"""Triggers of replanning as sentences for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import format_seconds
from lmswap.session.replan_triggers import (
    AccumulatedGradients,
    CompressedExcess,
    HeldGrowth,
    InUseGrowth,
    LossExcess,
    MisplacedTensor,
    PredictionOff,
    SlowPlan,
    Trigger,
    UnusedMargin,
    UnusedMemory,
    WarmUpGrowth,
)

ADDS_UP = "gradients are added to those of the steps before: from now on each is accumulated as it is computed"


def reason(found: Sequence[Trigger]) -> str:
    """Return what the triggers ``found`` at one step boundary say."""
    return "; ".join(map(_reason, found))


def _reason(trigger: Trigger) -> str:  # noqa: PLR0911 - a sentence for each
    match trigger:
        case AccumulatedGradients():
            return ADDS_UP
        case HeldGrowth(nbytes):
            return f"{format_bytes(nbytes)} more are held between steps than was planned for"
        case InUseGrowth(nbytes):
            return f"{format_bytes(nbytes)} more than before are in use between steps, beside what tensors hold"
        case WarmUpGrowth(_, fragmented_bytes) if fragmented_bytes:
            return f"fragmentation made the step take {format_bytes(fragmented_bytes)} too much"
        case WarmUpGrowth(grown_bytes, _):
            return f"{format_bytes(grown_bytes)} more are in use between steps than was planned for"
        case MisplacedTensor():
            return "a tensor of a step was still held at offsets of the next one"
        case CompressedExcess(taken_bytes, limit_bytes):
            return f"compressed tensors took {format_bytes(taken_bytes)}, more than {format_bytes(limit_bytes)}"
        case LossExcess(nbytes):
            return f"the loss takes {format_bytes(nbytes)}, more than the plan leaves it"
        case PredictionOff():
            return _prediction_off(trigger)
        case UnusedMemory():
            return "; ".join(_unused(trigger))
        case SlowPlan(excess):
            return f"the plan was {excess:.1%} above the best possible, and a longer search found a faster one"
        case UnusedMargin(nbytes):
            return f"the margin can be smaller by {format_bytes(nbytes)}, as growth is known now"
    raise TypeError(f"no sentence for {trigger}")


def _prediction_off(trigger: PredictionOff) -> str:
    worst, off = trigger.worst, f"measured {format_seconds(trigger.measured_seconds)}"
    off += f" against {format_seconds(trigger.predicted_seconds)} predicted"
    if trigger.host_seconds > worst.error_seconds:
        host = format_seconds(trigger.host_seconds)
        return f"{off}; the device waited for the host, which took {host} to queue its work"
    took = f"{format_seconds(worst.measured_seconds)} against {format_seconds(worst.predicted_seconds)}"
    return f"{off}; most off is op {trigger.worst_title}: {took}"


def _unused(trigger: UnusedMemory) -> Iterator[str]:
    if trigger.reserve_bytes > 0:
        yield f"the loss and the optimizer need {format_bytes(trigger.reserve_bytes)} less than was reserved for them"
    if trigger.results_bytes > 0:
        left = format_bytes(trigger.results_bytes)
        yield f"gradients of the last step are not held for as long as they might be, which leaves {left}"
