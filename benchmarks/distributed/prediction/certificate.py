"""Lower bound on the seconds of a step of several ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmswap.ir.certificate import Certificate
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import Program


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


def truncated(program: Program, costs: OpCosts, stop: int) -> tuple[Program, OpCosts]:
    """The step before op ``stop``, and the costs of its ops."""
    segments = tuple(replace(s, stop=min(s.stop, stop)) for s in program.segments if s.start < stop)
    scratch_bytes = program.scratch_bytes[:stop]
    program = replace(program, ops=program.ops[:stop], segments=segments, scratch_bytes=scratch_bytes)
    return program, OpCosts(costs.seconds[:stop], costs.scratch_bytes[:stop], costs.source, costs.pieces[:stop])
