"""How many random cases does a fuzz test try? A few in CI, and LMSWAP_FUZZ times as many by `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

_FACTOR = int(os.environ.get("LMSWAP_FUZZ", "1"))


def cases(number: int) -> settings:
    """Settings of a test that tries ``number`` cases in CI: the same ones each time there, others in the long form."""
    return settings(
        max_examples=number * _FACTOR,
        derandomize=_FACTOR == 1,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
