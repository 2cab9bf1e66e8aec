"""Independent verifier of a bound for several ranks: shares no code with `predict` or `ddp_buckets`.

`predict` has the proof. A certificate of the step truncated after an op bounds the whole step up to the first
run of that op: a plan up to there is a plan for those ops alone, in which buffers that are only needed later may be
dropped at once. So less has to be resident, copied or recomputed.

The rest, R seconds of ops and S of all-reduces, is bounded by prices: at a price x of compute and y of the network,
with x ≤ 1, y ≤ 1 and c x + b y ≤ 1 for the factors c and b, it takes at least x R + y S seconds.
"""

from __future__ import annotations

from typing import Any

from benchmarks.distributed.prediction.certificate import RanksCertificate, truncated
from benchmarks.distributed.prediction.ranks import Ranks
from lmswap.errors import PlanInvalid
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.bound.verify_certificate import verify_certificate

_TOLERANCE = 1e-9
_MIB = 2**20


def verify_ranks_certificate(
    program: Program,
    costs: OpCosts,
    machine: Machine,
    ranks: Ranks,
    certificate: RanksCertificate,
    *,
    budget_bytes: int,
    tier: str,
    min_swap_bytes: int,
) -> None:
    """Checks ``certificate`` against the arguments of `predict_ranks`; ``machine`` is one rank's.

    Raises:
        PlanInvalid: it is malformed, or states more than it proves.
        OptionError: ``machine`` has no such tier.
    """
    limits: dict[str, Any] = {"budget_bytes": budget_bytes, "tier": tier, "min_swap_bytes": min_swap_bytes}
    verify_certificate(program, costs, machine, certificate.alone, **limits)
    proven = certificate.alone.seconds
    if certificate.bucket is not None and certificate.before is not None:
        buckets = _buckets(program) if ranks.count > 1 else []
        if not 0 <= certificate.bucket < len(buckets):
            raise PlanInvalid("certificate", f"names bucket {certificate.bucket} of {len(buckets)}")
        stop = max(op for _, op in buckets[certificate.bucket]) + 1
        verify_certificate(*truncated(program, costs, stop), machine, certificate.before, **limits)
        sums = [ranks.all_reduce_seconds(sum(n for n, _ in bucket)) for bucket in buckets[certificate.bucket :]]
        proven = max(proven, certificate.before.seconds + _least(ranks, sum(costs.seconds[stop:]), sum(sums)))
    if not certificate.seconds <= proven * (1 + _TOLERANCE):
        raise PlanInvalid("certificate", f"states {certificate.seconds} seconds for the ranks, {proven} are proven")


def _least(ranks: Ranks, computed: float, summed: float) -> float:
    """The bound at the best prices of compute and the network, which are a corner of the feasible set."""
    c, b = ranks.network.compute_factor, ranks.network.busy_factor
    corners = [(1.0, 1.0)] if c + b <= 1 else [(1.0, (1 - c) / b), ((1 - b) / c, 1.0)]
    return max(x * computed + y * summed for x, y in corners)


def _buckets(program: Program) -> list[list[tuple[int, int]]]:
    """By bucket: (bytes, op that it has to wait for) of its gradients; 1 MiB fill the first one, 25 MiB the others."""
    made = {buffer: op.index for op in program.ops for buffer in op.writes}
    gradients = [
        (op.index, place, buffer)
        for op in program.ops
        for place, buffer in enumerate(op.writes)
        if program.buffers[buffer].kind is BufferKind.GRADIENT and made[buffer] == op.index
    ]
    buckets: list[list[tuple[int, int]]] = []
    for op, _, buffer in sorted(gradients):
        full_bytes = _MIB if len(buckets) == 1 else 25 * _MIB
        if not buckets or sum(nbytes for nbytes, _ in buckets[-1]) >= full_bytes:
            buckets.append([])
        buckets[-1].append((program.buffers[buffer].nbytes, op))
    return [bucket for bucket in buckets if any(nbytes for nbytes, _ in bucket)]
