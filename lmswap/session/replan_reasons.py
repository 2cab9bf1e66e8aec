"""Reasons for replanning a step, as sentences for reports."""

from __future__ import annotations

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.program import Program
from lmswap.plan.calibrate import Calibration
from lmswap.reporting.text import format_seconds
from lmswap.session.budget import Allowance

ADDS_UP = "gradients are added to those of the steps before: from now on each is accumulated as it is computed"


def has_grown(allowance: Allowance) -> str:
    """Reason: more is in use between steps than was planned for."""
    if allowance.fragmented_bytes:
        return f"fragmentation made the step take {format_bytes(allowance.fragmented_bytes)} too much"
    return f"{format_bytes(allowance.grown_bytes)} more are in use between steps than was planned for"


def holds_more(nbytes: int) -> str:
    """Reason: tensors outside of the step hold ``nbytes`` more than was planned for."""
    return f"{format_bytes(nbytes)} more are held between steps than was planned for"


def is_in_use(nbytes: int) -> str:
    """Reason: memory other than tensors grew by ``nbytes`` between steps."""
    return f"{format_bytes(nbytes)} more than before are in use between steps, beside what tensors hold"


def has_room(spared_bytes: int, results_bytes: int = 0) -> str:
    """Reason: less is needed outside of the arena, of the reserve and for gradients that the caller may hold."""
    spared = f"the loss and the optimizer need {format_bytes(spared_bytes)} less than was reserved for them"
    held = "gradients of the last step are not held for as long as they might be, which leaves "
    return "; ".join([spared] * (spared_bytes > 0) + [held + format_bytes(results_bytes)] * (results_bytes > 0))


def is_settled(nbytes: int) -> str:
    """Reason: steps have grown by ``nbytes`` less than the margin."""
    return f"the margin can be smaller by {format_bytes(nbytes)}, as growth is known now"


def was_off(found: Calibration, program: Program) -> str:
    """Reason: the error of the prediction, and the op with the largest error."""
    measured, predicted = format_seconds(found.measured_seconds), format_seconds(found.predicted_seconds)
    worst, op = found.worst, program.ops[found.worst.op]
    took = f"{format_seconds(worst.measured_seconds)} against {format_seconds(worst.predicted_seconds)}"
    host = f"; the device waited for the host, which took {format_seconds(found.host_seconds)} to queue its work"
    most = host if found.host_seconds > worst.error_seconds else f"; most off is op {op.title}: {took}"
    return f"measured {measured} against {predicted} predicted{most}"
