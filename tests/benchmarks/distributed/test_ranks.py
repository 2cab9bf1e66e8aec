"""All-reduces against rounds of messages played through one by one, and what ranks of a node leave each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.distributed.prediction.network import PRESETS, Network
from benchmarks.distributed.prediction.ranks import Ranks
from lmswap.errors import OptionError
from lmswap.ir.machine import Link, Rate, Tier
from tests.ir.build import unit_machine

WITHIN, BETWEEN = Rate.constant(8.0, 0.25), Rate.constant(2.0, 1.0)


def network(algorithm="ring", *, in_node=4, per_link=1, within=WITHIN, between=BETWEEN):
    return Network("test", in_node, per_link, algorithm, within, between)


def play_ring(parts, rate):
    """Sums parts[rank][part] over the ranks of a ring, in place, message by message; the seconds of all rounds.

    In round r rank i hands part i - r to rank i + 1: first to be added, from round N - 1 on to be kept.
    """
    count, seconds = len(parts), 0.0
    for turn in range(2 * (count - 1)):
        messages = [
            ((rank + 1) % count, (rank - turn) % count, parts[rank][(rank - turn) % count]) for rank in range(count)
        ]
        for to, part, values in messages:
            kept = parts[to][part] if turn < count - 1 else [0] * len(values)
            parts[to][part] = [one + other for one, other in zip(values, kept, strict=True)]
        seconds += max(rate(rank, len(values)) for rank, (_, _, values) in enumerate(messages))
    return seconds


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.permutations([WITHIN, BETWEEN]))
def test_a_ring_takes_the_seconds_of_its_messages_and_sums(count, part_bytes, in_node, rates):
    within, between = rates
    parts = [[[rank + 10 * part] * part_bytes for part in range(count)] for rank in range(count)]
    expected = [[sum(parts[rank][part][0] for rank in range(count))] * part_bytes for part in range(count)]

    def rate(rank, nbytes):  # to the next one, which may be in another node
        leaves = rank // in_node != (rank + 1) % count // in_node
        return (between if leaves else within).seconds(nbytes)

    seconds = play_ring(parts, rate)
    assert parts == [expected] * count
    own = network(in_node=in_node, within=within, between=between)
    found = Ranks(count, own).all_reduce_seconds(count * part_bytes)
    assert found == pytest.approx(seconds)


def test_a_hierarchical_sum_is_a_scatter_a_ring_over_nodes_and_a_gather():
    # 3 nodes of 4, 24 bytes: 3 rounds of 6 bytes within; 4 rounds in which a node's four parts of 2 bytes leave it
    # together; 3 rounds within.
    ranks = Ranks(12, network("hierarchical"))
    assert ranks.all_reduce_seconds(24) == pytest.approx(2 * 3 * (0.25 + 6 / 8) + 4 * (1.0 + 8 / 2))
    # A ring of all 12 passes 2 bytes in each of 22 rounds, one of them over the slow link.
    assert Ranks(12, network("ring")).all_reduce_seconds(24) == pytest.approx(22 * (1.0 + 2 / 2))


@given(st.sampled_from(["ring", "hierarchical"]), st.sampled_from([1, 2, 3, 4, 8, 12]), st.integers(0, 2**30))
def test_no_sum_is_faster_than_its_bytes_can_leave_a_rank(algorithm, count, nbytes):
    # Patarasuk and Yuan: 2 (N - 1) / N of the bytes leave each rank.
    seconds = Ranks(count, network(algorithm)).all_reduce_seconds(nbytes)
    assert seconds >= 2 * (count - 1) / count * nbytes / 8.0 * (1 - 1e-9)
    assert (seconds == 0) == (count == 1 or nbytes == 0)


@pytest.mark.parametrize(
    ("count", "of", "sentence"),
    [
        (0, network(), "there must be 1 rank or more, not 0"),
        (5, network(between=None), "network 'test' is one node of 4 ranks, not of 5"),
        (6, network("hierarchical"), "needs full nodes: 6 ranks are no multiple of 4"),
    ],
)
def test_ranks_that_the_network_cannot_join_are_refused(count, of, sentence):
    with pytest.raises(OptionError, match=sentence):
        Ranks(count, of)


@pytest.mark.parametrize(("count", "local", "on_link"), [(1, 1, 1), (2, 2, 2), (3, 3, 2), (8, 4, 2)])
def test_ranks_of_a_node_share_host_links_memory_and_disk_and_no_device(count, local, on_link):
    whole = Link(Rate.constant(12.0), Rate.constant(24.0), both_factor=0.8, busy_factor=0.9, compute_factor=0.7)
    tiers = tuple(Tier(name, 120, whole) for name in ("host", "disk", "compressed", "device"))
    own = Ranks(count, network(per_link=2)).share_of(replace(unit_machine(), tiers=tiers))
    for name, sharing, capacity in (
        ("host", on_link, 120 // local),
        ("disk", local, 120 // local),
        ("compressed", local, 120 // local),
        ("device", 1, 120),
    ):
        tier = own.tier(name)
        assert tier.capacity_bytes == capacity
        assert tier.link.out_rate.seconds(60) == pytest.approx(5.0 * sharing)
        assert tier.link.in_rate.seconds(60) == pytest.approx(2.5 * sharing)
        assert replace(tier.link, out_rate=whole.out_rate, in_rate=whole.in_rate) == whole


def test_the_case_studys_networks_have_its_rates():
    # 100 Gb/s and 60.4 GB/s: 1 GB among 16 GPUs of 4 nodes crosses the network in 6 rounds of a quarter.
    seconds = Ranks(16, PRESETS["ac922"]).all_reduce_seconds(10**9)
    assert seconds == pytest.approx(6 / 4 / 60.4 + 6 / 4 / 12.5)
    assert Ranks(2, PRESETS["x86"]).all_reduce_seconds(10**9) == pytest.approx(1 / 7.6)
