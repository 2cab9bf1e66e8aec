"""Steps of several ranks: derived by hand, never below their bound, and bounds that cannot be forged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.distributed.prediction.certificate import RanksCertificate
from benchmarks.distributed.prediction.network import Network
from benchmarks.distributed.prediction.predict import predict_ranks
from benchmarks.distributed.prediction.ranks import Ranks
from benchmarks.distributed.prediction.verify_ranks import verify_ranks_certificate
from lmswap.analyze.memory import StepMemory
from lmswap.errors import OptionError, PlanInfeasible, PlanInvalid
from lmswap.ir.certificate import Certificate
from lmswap.ir.machine import Rate
from lmswap.ir.timeline import Lane
from lmswap.planner import POLICIES, make_plan
from tests.ir.build import build, unit_machine
from tests.ir.strategies import machines, networks, steps

MIB = 2**20
LIMITS = {"tier": "host", "min_swap_bytes": 1}

# Gradients of 1 and 2 MiB: a bucket each.
STEP = build(
    """
    forward
    f1 1: x -> a
    f2 1: a -> y
    backward
    g2 4: t a -> gw2 gb
    g1 2: a gb -> gw1
    """,
    sizes={"gw2": MIB, "gw1": 2 * MIB},
    outputs="y",
    tangents="t",
    gradients="gw2 gw1",
)


def two_ranks(mib_per_second=1.0, *, busy_factor=1.0, compute_factor=1.0):
    """Of which each sends and receives so much: n bytes are summed in the time that n bytes take."""
    rate = Rate.constant(mib_per_second * MIB)
    return Ranks(2, Network("pair", 2, 1, "ring", rate, None, busy_factor, compute_factor))


def predict(step, ranks, *, machine=None, policy="none", budget_bytes=2**40):
    machine = machine or unit_machine()
    plan = make_plan(policy, step.program, step.costs, machine, budget_bytes=budget_bytes, **LIMITS)
    return predict_ranks(plan, step.program, step.costs, machine, ranks, **LIMITS)


def network_spans(found):
    return [(s.name, s.start_seconds, s.end_seconds) for s in found.timeline.spans if s.lane is Lane.NETWORK]


def test_all_reduces_overlap_the_backward_one_after_the_other():
    # g2 ends at 6: gw2 takes 1 s under g1, which ends at 8; gw1 takes 2 s more.
    found = predict(STEP, two_ranks())
    assert network_spans(found) == [("bucket 0", 6, 7), ("bucket 1", 8, 10)]
    assert (found.seconds, found.alone_seconds, found.all_reduce_seconds) == (10, 8, 3)
    assert found.hidden_share == pytest.approx(1 / 3)
    # At a tenth of the rate the first one keeps the second waiting: 6 + 10 + 20.
    slow = predict(STEP, two_ranks(0.1))
    assert slow.seconds == pytest.approx(36)
    assert slow.hidden_share == pytest.approx(2 / 30)


def test_sums_and_compute_slow_each_other_while_both_run():
    # From 6 on gw2, 1 s, and g1, 2 s, side by side: at 8 gw2 is summed and g1 half done, so that it ends at 9.
    found = predict(STEP, two_ranks(busy_factor=0.5, compute_factor=0.5))
    assert network_spans(found) == [("bucket 0", 6, 8), ("bucket 1", 9, 11)]
    assert found.seconds == 11
    # Here g1 is over first, at 8.5, of gw2 0.625 s are summed then, and the other 0.375 s at full rate.
    found = predict(STEP, two_ranks(busy_factor=0.25, compute_factor=0.8))
    assert network_spans(found) == [("bucket 0", 6, 8.875), ("bucket 1", 8.875, 10.875)]


def test_sums_have_their_full_rate_while_compute_waits_for_copies():
    # a, 4 MiB, leaves from 1 to 5 and is back at 14, after g2, which ends at 10: gv, 1 MiB, is summed from 7 on, beside
    # g2 for 3 s and half of it, and in 0.5 s more while nothing is computed.
    step = build(
        """
        forward
        f1 1!random: x -> a
        f2 1: x -> b
        backward
        g3 2: t -> gv s
        g2 3: b -> m
        g1 1: t a -> gw
        """,
        sizes={"x": 0, "a": 4 * MIB, "b": 0, "s": 4 * MIB, "m": 4 * MIB, "gv": MIB, "gw": MIB, "t": 0},
        tangents="t",
        gradients="gv gw",
    )
    ranks = two_ranks(busy_factor=1 / 6)
    found = predict(step, ranks, machine=unit_machine(out=MIB, into=MIB), policy="swap", budget_bytes=6 * MIB)
    stalls = [span for span in found.timeline.spans if span.lane is Lane.STALL]
    (g2,) = [span for span in found.timeline.spans if span.name == "g2"]
    assert stalls[-1].end_seconds - g2.end_seconds == pytest.approx(4)
    (first, _) = network_spans(found)
    assert first[2] == pytest.approx(g2.end_seconds + 0.5)


def test_one_rank_sums_nothing():
    found = predict(STEP, replace(two_ranks(), count=1))
    assert (found.seconds, found.all_reduce_seconds, found.hidden_share) == (8, 0, None)
    assert found.certificate == RanksCertificate(8.0, Certificate(8.0))


@pytest.mark.parametrize(("rate", "bucket"), [(1.0, 1), (0.1, 0)])
def test_without_waits_the_bound_is_the_step(rate, bucket):
    found = predict(STEP, two_ranks(rate))
    assert found.certificate.seconds == found.seconds
    assert found.certificate.bucket == bucket


@pytest.mark.parametrize(("busy_factor", "compute_factor"), [(0.5, 0.5), (0.8, 0.8), (1.0, 0.5), (0.5, 1.0)])
def test_the_bound_counts_contention_of_all_reduces_and_compute(busy_factor, compute_factor):
    # At a tenth of the rate gw2 takes 10 s, and g1 is over long before.
    found = predict(STEP, two_ranks(0.1, busy_factor=busy_factor, compute_factor=compute_factor))
    g1 = 2 / compute_factor
    assert found.seconds == pytest.approx(6 + g1 + (10 - busy_factor * g1) + 20)
    assert found.certificate.seconds == pytest.approx(found.seconds)


def test_a_bound_above_the_slowdown_of_sums_and_compute_is_refused():
    ranks = two_ranks(busy_factor=0.75, compute_factor=0.75)
    question = (STEP.program, STEP.costs, unit_machine(), ranks)
    # 6 s to gw2; 3 s of sums and 2 s of compute, of which 8/3 s are side by side: 5 s - 0.5 * 8/3 s.
    honest = RanksCertificate(6 + 5 - 4 / 3, Certificate(8.0), 0, Certificate(6.0))
    verify_ranks_certificate(*question, honest, budget_bytes=2**40, **LIMITS)
    with pytest.raises(PlanInvalid, match="certificate"):
        forged = replace(honest, seconds=honest.seconds + 1e-6)
        verify_ranks_certificate(*question, forged, budget_bytes=2**40, **LIMITS)


def test_the_bound_counts_the_waits_before_a_bucket_is_complete():
    # All of a, 4 MiB, is away while m is made: out in 4 s after f1, before the backward, in in 4 s after g2, then
    # g1: 2 + 4 + 1 + 3 + 4 + 1, and 5 s for the sum of gw. Without waits gv would bound more: 4 + 5 + 5.
    step = build(
        """
        forward
        f1 2!random: x -> a
        f2 1: x -> b
        backward
        g3 1: t -> gv s
        g2 3: b -> m
        g1 1: t a -> gw
        """,
        sizes={"x": 0, "a": 4 * MIB, "b": MIB, "s": 4 * MIB, "m": 4 * MIB, "gv": MIB, "gw": MIB, "t": 0},
        tangents="t",
        gradients="gv gw",
    )
    machine = unit_machine(out=MIB, into=MIB)
    found = predict(step, two_ranks(0.2), machine=machine, policy="auto", budget_bytes=6 * MIB)
    assert found.seconds == pytest.approx(2 + 4 + 1 + 3 + 4 + 1 + 5)
    assert found.certificate.bucket == 1
    assert found.certificate.seconds == pytest.approx(found.certificate.before.seconds + 5)
    assert found.certificate.seconds > 14


def in_mib(step, machine):
    """The same with MiB for bytes, so that gradients fill several buckets."""
    buffers = tuple(replace(buffer, nbytes=buffer.nbytes * MIB) for buffer in step.program.buffers)
    scratch = tuple(nbytes * MIB for nbytes in step.costs.scratch_bytes)
    link = machine.tier("host").link
    faster = replace(link, out_rate=link.out_rate.times(MIB), in_rate=link.in_rate.times(MIB))
    larger = replace(
        step, program=replace(step.program, buffers=buffers), costs=replace(step.costs, scratch_bytes=scratch)
    )
    return larger, machine.with_link("host", faster)


@pytest.mark.slow
@given(st.data(), steps(), machines(), networks())
def test_no_policy_is_below_the_bound_nor_hides_more_than_there_is(data, step, machine, network):
    step, machine = in_mib(step, machine)
    memory = StepMemory(step.program, step.costs)
    budget_bytes = data.draw(st.integers(int(memory.floor.max()), memory.peak.nbytes))
    fast = replace(network, within_node=network.within_node.times(MIB))
    ranks = Ranks(data.draw(st.integers(1, network.ranks_per_node)), fast)
    for policy in POLICIES:
        try:
            found = predict(step, ranks, machine=machine, policy=policy, budget_bytes=budget_bytes)
        except PlanInfeasible:
            continue
        assert found.certificate.seconds <= found.seconds * (1 + 1e-9)
        assert found.seconds >= found.alone_seconds
        assert found.hidden_share is None or -1e-9 <= found.hidden_share <= 1 + 1e-9


@pytest.mark.parametrize(
    "forged",
    [
        {"seconds": 10.001},
        {"seconds": float("nan")},
        {"alone": Certificate(8.001)},
        {"before": Certificate(8.001)},
        {"before": None},
        {"bucket": 0},  # whose gradient is there after 6 s
        {"bucket": 2},
        {"bucket": -1},
        {"bucket": None},
    ],
    ids=str,
)
def test_a_bound_that_is_not_proven_is_refused(forged):
    honest = RanksCertificate(10.0, Certificate(8.0), 1, Certificate(8.0))
    question = (STEP.program, STEP.costs, unit_machine(), two_ranks())
    verify_ranks_certificate(*question, honest, budget_bytes=2**40, **LIMITS)
    with pytest.raises(PlanInvalid, match="certificate"):
        verify_ranks_certificate(*question, replace(honest, **forged), budget_bytes=2**40, **LIMITS)


def test_the_sums_of_one_rank_prove_nothing():
    honest = RanksCertificate(10.0, Certificate(8.0), 1, Certificate(8.0))
    alone = replace(two_ranks(), count=1)
    with pytest.raises(PlanInvalid, match="bucket 1 of 0"):
        verify_ranks_certificate(STEP.program, STEP.costs, unit_machine(), alone, honest, budget_bytes=2**40, **LIMITS)


def test_a_tier_that_the_machine_has_not_is_refused():
    plan = make_plan("none", STEP.program, STEP.costs, unit_machine(), budget_bytes=2**40, **LIMITS)
    with pytest.raises(OptionError, match="tape"):
        predict_ranks(plan, STEP.program, STEP.costs, unit_machine(), two_ranks(), tier="tape", min_swap_bytes=1)
