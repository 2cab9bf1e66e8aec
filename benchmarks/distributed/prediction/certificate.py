"""Lower bound on the seconds of a step of several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.certificate import Certificate


@dataclass(frozen=True)
class RanksCertificate:
    """No plan that all ranks follow takes less than ``seconds`` a step, all-reduces of gradients included.

    ``alone`` bounds one rank's step without the network. ``before``, if any, bounds the step truncated after the op
    that bucket ``bucket`` waits for: only then can it and all later ones be all-reduced, one after the other.
    """

    seconds: float
    alone: Certificate
    bucket: int | None = None
    before: Certificate | None = None
