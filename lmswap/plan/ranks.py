"""What does a step take of ranks that sum their gradients? One rank's plan + network → timeline and certificate.

All ranks do the same at the same time, each by the same plan. The network lane sums one bucket after the other, each
from when its gradients have arrived; nothing waits for it but the end of the step, where the optimizer begins. Sums and
compute slow each other as the network says; what sums take of the links to the host is not counted.

The bound: the sum of a bucket cannot begin before the ops are over that it waits for, and no plan is faster with these
than the certificate of the step broken off after them; from then on the network lane has this bucket and all later ones
to sum, S seconds, and compute all later ops, R seconds. So for any bucket b

    seconds ≥ (certificate of the ops up to the last that b waits for) + (least seconds of R and S side by side)

and seconds ≥ (certificate of the whole step). The best of these is taken. In t seconds side by side compute does c t
and the network b t, c and b being their factors, so R and S take at least R + S - (c + b - 1) t. Side by side they are
for no longer than min(R / c, S / b), and if c + b is less than 1, best not at all. Copies and stalls only add to that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from lmswap.ir.certificate import RanksCertificate
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.network import Network
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.ranks import Ranks
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Timeline
from lmswap.plan.certify import certify
from lmswap.plan.ddp_buckets import Bucket, fill_buckets
from lmswap.plan.network_lane import RankLanes, Sum
from lmswap.plan.simulate import simulate
from lmswap.plan.verify_ranks import verify_ranks_certificate


@dataclass(frozen=True)
class RanksStep:
    """A predicted step of ``ranks``, each of which follows a plan of ``alone_seconds`` without the network."""

    ranks: Ranks
    timeline: Timeline
    alone_seconds: float
    certificate: RanksCertificate

    @property
    def seconds(self) -> float:
        """Until compute and the network are done."""
        return self.timeline.seconds

    @property
    def all_reduce_seconds(self) -> float:
        """For how long the network sums."""
        return self.timeline.lane_seconds(Lane.NETWORK)

    @property
    def hidden_share(self) -> float | None:
        """The share of that which does not lengthen the step; None if there is nothing to sum."""
        summed = self.all_reduce_seconds
        return 1 - (self.seconds - self.alone_seconds) / summed if summed else None


def predict_ranks(
    plan: Plan, program: Program, costs: OpCosts, machine: Machine, ranks: Ranks, *, tier: str, min_swap_bytes: int
) -> RanksStep:
    """The step of ``ranks`` by ``plan``, which `make_plan` made for the share of ``machine`` that each has.

    Its bound is checked. The other arguments are those of `make_plan`.

    Raises:
        PlanInvalid: a bug here.
    """
    limits: dict[str, Any] = {"budget_bytes": plan.budget_bytes, "tier": tier, "min_swap_bytes": min_swap_bytes}
    buckets = fill_buckets(program) if ranks.count > 1 else ()
    sums = [ranks.all_reduce_seconds(bucket.nbytes) for bucket in buckets]
    lanes = RankLanes(ranks.network, _arriving(program, plan, buckets, sums), machine.host)
    timeline = simulate(program, costs, machine, plan, lanes=lanes)
    joined = replace(timeline, spans=(*timeline.spans, *lanes.finish()))
    certificate = RanksCertificate(0.0, plan.certificate or certify(program, costs, machine, **limits))
    behind = _behind(ranks.network, buckets, sums, costs)
    for bucket in _telling(buckets, behind, costs):
        stop = buckets[bucket].last + 1
        before = certify(program.up_to(stop), costs.up_to(stop), machine, **limits)
        if before.seconds + behind[bucket] > certificate.seconds:
            certificate = replace(certificate, seconds=before.seconds + behind[bucket], bucket=bucket, before=before)
    # The same seconds, summed in another order, may differ in the last bits.
    seconds = min(max(certificate.seconds, certificate.alone.seconds), joined.seconds)
    certificate = replace(certificate, seconds=seconds)
    verify_ranks_certificate(program, costs, machine, ranks, certificate, **limits)
    return RanksStep(ranks, joined, plan.predicted_seconds, certificate)


def _arriving(
    program: Program, plan: Plan, buckets: Sequence[Bucket], sums: Sequence[float]
) -> Mapping[int, Sequence[Sum]]:
    """By position of the plan's schedule: the buckets that are complete when what runs there has run."""
    first: dict[int, int] = {}
    for position, op in enumerate(schedule(program, plan.recomputes).ops):
        first.setdefault(op, position)
    arriving: defaultdict[int, list[Sum]] = defaultdict(list)
    for number, (bucket, seconds) in enumerate(zip(buckets, sums, strict=True)):
        arriving[first[bucket.last]].append(Sum(f"bucket {number}", bucket.nbytes, seconds))
    return arriving


def _behind(network: Network, buckets: Sequence[Bucket], sums: Sequence[float], costs: OpCosts) -> list[float]:
    """By bucket: the least seconds from when it is complete, in which it and all that is later is summed and run."""
    gained = max(0.0, network.compute_factor + network.busy_factor - 1)
    behind = []
    for number, bucket in enumerate(buckets):
        computed, summed = math.fsum(costs.seconds[bucket.last + 1 :]), math.fsum(sums[number:])
        beside = min(computed / network.compute_factor, summed / network.busy_factor)
        behind.append(computed + summed - gained * beside)
    return behind


def _telling(buckets: Sequence[Bucket], behind: Sequence[float], costs: OpCosts) -> set[int]:
    """The buckets that may bound most: by ops without waits, and the last one, before which most waits are."""
    if not buckets:
        return set()
    ends = list(accumulate(costs.seconds))
    without_waits = max(range(len(buckets)), key=lambda bucket: ends[buckets[bucket].last] + behind[bucket])
    return {without_waits, len(buckets) - 1}
