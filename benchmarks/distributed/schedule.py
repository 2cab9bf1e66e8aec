"""The learning rate of each step: it rises with the global batch, warms up, then falls as a polynomial."""

from __future__ import annotations

START_RATE = 0.001
RATE, RATE_BATCH = 0.1, 256  # a global batch of 256 trains at 0.1; one of 16,384 at 6.4
WARM_UP_SHARE = 10 / 90  # of all epochs
POWER = 2


def peak_rate(global_batch: int) -> float:
    """The learning rate at the end of the warm-up, in proportion to the global batch."""
    return RATE * global_batch / RATE_BATCH


def learning_rate(step: int, num_steps: int, global_batch: int) -> float:
    """The rate of step ``step`` (from 0) of all ``num_steps``: a line up to the peak, then a parabola down to 0."""
    peak, warm_up = peak_rate(global_batch), WARM_UP_SHARE * num_steps
    if step < warm_up:
        return START_RATE + (peak - START_RATE) * step / warm_up
    return float(peak * (1 - (step - warm_up) / (num_steps - warm_up)) ** POWER)
