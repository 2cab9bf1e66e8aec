"""How many random examples tests try: a few fixed ones, and by `make fuzz` LMSWAP_FUZZ times as many, drawn anew."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

IS_FUZZING = "LMSWAP_FUZZ" in os.environ
FACTOR = int(os.environ.get("LMSWAP_FUZZ", "1"))


def cases(number: int) -> settings:
    """Settings of a test whose ``number`` of examples is its own; they are shown as they were drawn, not cut down."""
    return settings(
        max_examples=number * FACTOR,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
