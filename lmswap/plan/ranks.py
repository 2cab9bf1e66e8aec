"""What does a step take of ranks that sum their gradients? One rank's plan + network → timeline and certificate.

All ranks do the same at the same time, each by the same plan. The network lane sums one bucket after the other, each
from when its gradients have arrived; nothing waits for it but the end of the step, where the optimizer begins. What
sums take of the links to the host and of compute is not counted.

The bound: the sum of a bucket cannot begin before the ops are over that it waits for, and no plan is faster with these
than the certificate of the step broken off after them; from then on the network lane has this bucket and all later ones
to sum. So for any bucket b

    seconds ≥ (certificate of the ops up to the last that b waits for) + Σ_(b and later) seconds of the all-reduce

and seconds ≥ (certificate of the whole step). The best of these is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from lmswap.ir.certificate import RanksCertificate
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.ranks import Ranks
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.plan.buckets import Bucket, fill_buckets
from lmswap.plan.certify import certify
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
    buckets = fill_buckets(program, ranks.arrival) if ranks.count > 1 else ()
    sums = [ranks.all_reduce_seconds(bucket.nbytes) for bucket in buckets]
    timeline = simulate(program, costs, machine, plan)
    ends = _ends(program, plan, timeline)
    joined = replace(timeline, spans=(*timeline.spans, *_network_lane(buckets, sums, ends)))
    certificate = RanksCertificate(0.0, plan.certificate or certify(program, costs, machine, **limits))
    for bucket in _telling(buckets, sums, costs):
        stop = buckets[bucket].last + 1
        before = certify(program.up_to(stop), costs.up_to(stop), machine, **limits)
        if before.seconds + sum(sums[bucket:]) > certificate.seconds:
            certificate = replace(
                certificate, seconds=before.seconds + sum(sums[bucket:]), bucket=bucket, before=before
            )
    # The same seconds, summed in another order, may differ in the last bits.
    seconds = min(max(certificate.seconds, certificate.alone.seconds), joined.seconds)
    certificate = replace(certificate, seconds=seconds)
    verify_ranks_certificate(program, costs, machine, ranks, certificate, **limits)
    return RanksStep(ranks, joined, plan.predicted_seconds, certificate)


def _ends(program: Program, plan: Plan, timeline: Timeline) -> list[float]:
    """By op: when it has run for the first time."""
    ends = [0.0] * len(program.ops)
    computed = [span.end_seconds for span in timeline.spans if span.lane is Lane.COMPUTE]
    for op, end in reversed(list(zip(schedule(program, plan.reruns).ops, computed, strict=True))):
        ends[op] = end
    return ends


def _network_lane(buckets: Sequence[Bucket], sums: Sequence[float], ends: Sequence[float]) -> list[Span]:
    spans: list[Span] = []
    free = 0.0
    for number, (bucket, seconds) in enumerate(zip(buckets, sums, strict=True)):
        start = max(free, ends[bucket.last])
        free = start + seconds
        spans.append(Span(Lane.NETWORK, f"bucket {number}", start, free, bucket.nbytes))
    return spans


def _telling(buckets: Sequence[Bucket], sums: Sequence[float], costs: OpCosts) -> set[int]:
    """The buckets that may bound most: by ops without waits, and the last one, before which most waits are."""
    if not buckets:
        return set()
    ends = list(accumulate(costs.seconds))
    behind = list(accumulate(reversed(sums)))[::-1]
    without_waits = max(range(len(buckets)), key=lambda bucket: ends[buckets[bucket].last] + behind[bucket])
    return {without_waits, len(buckets) - 1}
