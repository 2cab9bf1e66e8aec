"""The number of random examples of tests: a few fixed ones, or LMSWAP_FUZZ times as many random ones by `make fuzz`."""

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
