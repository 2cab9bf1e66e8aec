"""Why is a step planned again? In words for people."""

from __future__ import annotations

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.program import Program
from lmswap.plan.calibrate import Calibration
from lmswap.reporting.text import format_seconds
from lmswap.session.allowance import Allowance

ADDS_UP = "gradients are added to those of the steps before: each is handed over as it is made from now on"


def has_grown(allowance: Allowance) -> str:
    """More is in use between steps than was planned for."""
    if allowance.scattered_bytes:
        return f"tensors lay so scattered that the step took {format_bytes(allowance.scattered_bytes)} too much"
    return f"{format_bytes(allowance.grown_bytes)} more are in use between steps than was planned for"


def holds_more(nbytes: int) -> str:
    """Tensors outside of the step hold ``nbytes`` more than was planned for."""
    return f"{format_bytes(nbytes)} more are held between steps than was planned for"


def is_in_use(nbytes: int) -> str:
    """Beside tensors ``nbytes`` have come into use between steps."""
    return f"{format_bytes(nbytes)} more than before are in use between steps, beside what tensors hold"


def has_room(spared_bytes: int, results_bytes: int = 0) -> str:
    """Less is needed beside the step's places: of what was reserved, and for gradients that the caller may hold."""
    spared = f"the loss and the optimizer need {format_bytes(spared_bytes)} less than was reserved for them"
    held = "gradients of the last step are not held for as long as they might be, which leaves "
    return "; ".join([spared] * (spared_bytes > 0) + [held + format_bytes(results_bytes)] * (results_bytes > 0))


def is_settled(nbytes: int) -> str:
    """Steps have grown by so much less than the margin leaves to them."""
    return f"the margin can be smaller by {format_bytes(nbytes)}, as growth is known now"


def was_off(found: Calibration, program: Program) -> str:
    """By how much the prediction was off, and which op most."""
    measured, predicted = format_seconds(found.measured_seconds), format_seconds(found.predicted_seconds)
    worst, op = found.worst, program.ops[found.worst.op]
    took = f"{format_seconds(worst.measured_seconds)} against {format_seconds(worst.predicted_seconds)}"
    host = f"; the device waited for the host, which took {format_seconds(found.host_seconds)} to queue its work"
    most = host if found.host_seconds > worst.error_seconds else f"; most off is op {op.title}: {took}"
    return f"measured {measured} against {predicted} predicted{most}"
