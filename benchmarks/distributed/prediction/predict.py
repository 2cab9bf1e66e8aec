"""Prediction of a data-parallel step: one rank's plan + network → timeline and certificate.

All ranks run the same plan in lockstep. The network lane all-reduces one bucket after the other, each once its
gradients are complete; only the end of the step, where the optimizer begins, waits for it. All-reduces and compute slow
each other by the network's factors; the all-reduces' use of the links to the host is not modelled.

The bound: the all-reduce of a bucket cannot begin before the ops that it waits for have ended, and no plan runs these
faster than the certificate of the step truncated after them; from then on the network lane has this bucket and all
later ones to reduce, S seconds, and compute all later ops, R seconds. So for any bucket b

    seconds ≥ (certificate of the ops up to the last that b waits for) + (least seconds of R and S in parallel)

and seconds ≥ (certificate of the whole step). The best of these is taken. In t seconds in parallel compute does c t
and the network b t, c and b being their factors, so R and S take at least R + S - (c + b - 1) t. They overlap for no
longer than min(R / c, S / b), and if c + b is less than 1, optimally not at all. Copies and stalls only add to that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from benchmarks.distributed.prediction.certificate import RanksCertificate, truncated
from benchmarks.distributed.prediction.ddp_buckets import Bucket, fill_buckets
from benchmarks.distributed.prediction.network import Network
from benchmarks.distributed.prediction.network_lane import RankLanes, Sum
from benchmarks.distributed.prediction.ranks import Ranks
from benchmarks.distributed.prediction.verify_ranks import verify_ranks_certificate
from lmswap.analyze.memory import StepMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Timeline
from lmswap.planner.bound.certify import certify
from lmswap.planner.simulate import simulate


@dataclass(frozen=True)
class RanksStep:
    """A predicted step of ``ranks``, each of which follows a plan of ``alone_seconds`` without the network."""

    ranks: Ranks
    timeline: Timeline
    alone_seconds: float
    certificate: RanksCertificate

    @property
    def seconds(self) -> float:
        """Seconds until compute and the network have finished."""
        return self.timeline.seconds

    @property
    def all_reduce_seconds(self) -> float:
        """Seconds of all-reduces on the network."""
        return self.timeline.lane_seconds(Lane.NETWORK)

    @property
    def hidden_share(self) -> float | None:
        """The share of all-reduce seconds that does not lengthen the step; None if there are none."""
        summed = self.all_reduce_seconds
        return 1 - (self.seconds - self.alone_seconds) / summed if summed else None


def predict_ranks(
    plan: Plan, program: Program, costs: OpCosts, machine: Machine, ranks: Ranks, *, tier: str, min_swap_bytes: int
) -> RanksStep:
    """Predicts the step of ``ranks`` under ``plan``, and bounds it; the bound is verified.

    Args:
        plan: of `make_plan`, for one rank's share of the machine.
        program: the step; it and the following are the arguments of `make_plan`.
        costs: of one rank.
        machine: one rank's share.
        ranks: their number and network.
        tier: as in `make_plan`.
        min_swap_bytes: as in `make_plan`.

    Raises:
        PlanInvalid: a bug in the bound.
    """
    limits: dict[str, Any] = {"budget_bytes": plan.budget_bytes, "tier": tier, "min_swap_bytes": min_swap_bytes}
    buckets = fill_buckets(program) if ranks.count > 1 else ()
    sums = [ranks.all_reduce_seconds(bucket.nbytes) for bucket in buckets]
    lanes = RankLanes(ranks.network, _arriving(program, plan, buckets, sums), machine.host)
    timeline = simulate(program, costs, machine, plan, lanes=lanes)
    joined = replace(timeline, spans=(*timeline.spans, *lanes.finish()))
    certificate = RanksCertificate(0.0, plan.certificate or certify(StepMemory(program, costs), machine, **limits))
    behind = _behind(ranks.network, buckets, sums, costs)
    for bucket in _strongest_buckets(buckets, behind, costs):
        stop = buckets[bucket].last + 1
        before = certify(StepMemory(*truncated(program, costs, stop)), machine, **limits)
        if before.seconds + behind[bucket] > certificate.seconds:
            certificate = replace(certificate, seconds=before.seconds + behind[bucket], bucket=bucket, before=before)
    # The same seconds, summed in another order, may differ by rounding.
    seconds = min(max(certificate.seconds, certificate.alone.seconds), joined.seconds)
    certificate = replace(certificate, seconds=seconds)
    verify_ranks_certificate(program, costs, machine, ranks, certificate, **limits)
    return RanksStep(ranks, joined, plan.predicted_seconds, certificate)


def _arriving(
    program: Program, plan: Plan, buckets: Sequence[Bucket], sums: Sequence[float]
) -> Mapping[int, Sequence[Sum]]:
    """By position of the plan's schedule: the buckets that are complete after its op."""
    first: dict[int, int] = {}
    for position, op in enumerate(schedule(program, plan.recomputes).ops):
        first.setdefault(op, position)
    arriving: defaultdict[int, list[Sum]] = defaultdict(list)
    for number, (bucket, seconds) in enumerate(zip(buckets, sums, strict=True)):
        arriving[first[bucket.last]].append(Sum(f"bucket {number}", bucket.nbytes, seconds))
    return arriving


def _behind(network: Network, buckets: Sequence[Bucket], sums: Sequence[float], costs: OpCosts) -> list[float]:
    """By bucket: lower bound on the seconds from its completion to the end of the all-reduces and ops that remain."""
    gained = max(0.0, network.compute_factor + network.busy_factor - 1)
    behind = []
    for number, bucket in enumerate(buckets):
        computed, summed = math.fsum(costs.seconds[bucket.last + 1 :]), math.fsum(sums[number:])
        beside = min(computed / network.compute_factor, summed / network.busy_factor)
        behind.append(computed + summed - gained * beside)
    return behind


def _strongest_buckets(buckets: Sequence[Bucket], behind: Sequence[float], costs: OpCosts) -> set[int]:
    """The buckets with the strongest bounds: by ops without waits, and the last one, before which most waits are."""
    if not buckets:
        return set()
    ends = list(accumulate(costs.seconds))
    without_waits = max(range(len(buckets)), key=lambda bucket: ends[buckets[bucket].last] + behind[bucket])
    return {without_waits, len(buckets) - 1}
