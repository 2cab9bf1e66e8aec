"""Ranks on a network: the seconds of an all-reduce, and one rank's share of the machine.

Seconds of an all-reduce are those of two algorithms that libraries use, in the usual model: a rank sends and receives
simultaneously, and a round ends when its slowest message has arrived.

ring          2 (N - 1) rounds, in each of which every rank sends an Nth of the bytes to the next. No algorithm sends
              fewer (Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69, 2009).
hierarchical  a reduce-scatter among the ranks of a node; a ring over the nodes for each part, all parts at once; an
              all-gather within the node (Cho, Finkler, Kung and Hunter, BlueConnect, MLSys 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.distributed.prediction.network import Network
from lmswap.errors import OptionError
from lmswap.ir.machine import Machine, Rate, Tier


@dataclass(frozen=True)
class Ranks:
    """``count`` ranks on ``network``."""

    count: int
    network: Network

    def __post_init__(self) -> None:
        network, in_node = self.network, self.network.ranks_per_node
        if self.count < 1:
            raise OptionError(f"there must be 1 rank or more, not {self.count}")
        if self.count > in_node and network.between_nodes is None:
            raise OptionError(f"network '{network.name}' is one node of {in_node} ranks, not of {self.count}")
        if self.count > in_node and self.count % in_node and network.algorithm == "hierarchical":
            raise OptionError(
                f"a hierarchical all-reduce needs full nodes: {self.count} ranks are no multiple of {in_node}"
            )

    @property
    def in_node(self) -> int:
        """Number of ranks in the first node."""
        return min(self.count, self.network.ranks_per_node)

    def all_reduce_seconds(self, nbytes: int) -> float:
        """Seconds to all-reduce ``nbytes``, when nothing else uses the links."""
        within, between = self.network.within_node, self.network.between_nodes
        if between is None or self.count == self.in_node:
            return _ring_seconds(within, nbytes, self.count)
        if self.network.algorithm == "ring":  # of the messages of a round one leaves each node
            part = math.ceil(nbytes / self.count)
            slowest = max(within.seconds(part) if self.in_node > 1 else 0.0, between.seconds(part))
            return 2 * (self.count - 1) * slowest
        # The parts leave their node together: over the nodes they are one message of all bytes.
        num_nodes = self.count // self.in_node
        return _ring_seconds(within, nbytes, self.in_node) + _ring_seconds(between, nbytes, num_nodes)

    def share_of(self, machine: Machine) -> Machine:
        """One rank's share of ``machine``: of the host's links, memory and disk.

        Ranks that share a link copy simultaneously, each at its part of the rate. Devices, and the peer tier's memory,
        are not shared; a disk is shared by the node.
        """

        def share(tier: Tier) -> Tier:
            if tier.name in ("device", "peer"):
                return tier
            of_node = tier.name in ("disk", "compressed")  # whose cores compress for all of its ranks
            sharing = self.in_node if of_node else min(self.in_node, self.network.ranks_per_host_link)
            return replace(tier, capacity_bytes=tier.capacity_bytes // self.in_node, link=tier.link.times(1 / sharing))

        return replace(machine, tiers=tuple(map(share, machine.tiers)))


def _ring_seconds(rate: Rate, nbytes: int, count: int) -> float:
    return 2 * (count - 1) * rate.seconds(math.ceil(nbytes / count))
