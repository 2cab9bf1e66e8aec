"""Time model of a rank: compute, copy lanes, and a network lane of all-reduces in parallel.

All-reduces run one after the other, each once its gradients are complete. While one runs, compute runs at the network's
``compute_factor`` of its speed; while compute runs, all-reduces run at its ``busy_factor`` of their rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.distributed.prediction.network import Network
from lmswap.ir.machine import Host
from lmswap.ir.timeline import Lane, Span
from lmswap.planner.lane_model import Lanes


@dataclass(slots=True)
class Sum:
    """A bucket on the network: ``seconds`` remain, if nothing else runs."""

    name: str
    nbytes: int
    seconds: float


class RankLanes(Lanes):
    """The lanes of a rank; ``sums`` are, by position, the buckets that are complete after the op there."""

    def __init__(self, network: Network, sums: Mapping[int, Sequence[Sum]], host: Host | None) -> None:
        super().__init__(host)
        self._network, self._arriving = network, sums
        self._position = 0
        self._waiting: deque[Sum] = deque()
        self._begun = 0.0  # of the first bucket in the queue
        self._spans: list[Span] = []

    def run(self, seconds: float) -> None:
        """As `Lanes.run`: the op at the next position."""
        begun, share = self.clock, self._network.compute_factor
        beside = math.fsum(each.seconds for each in self._waiting) / self._network.busy_factor
        # Work of compute meanwhile, in seconds without copies.
        alone = beside - min(beside, self._copy_seconds_left()) * (1 - self._compute_factor)
        super().run(seconds / share if seconds < alone * share else seconds + alone * (1 - share))
        self._sum(begun, self.clock, self._network.busy_factor)
        if not self._waiting:
            self._begun = self.clock
        self._waiting += self._arriving.get(self._position, ())
        self._position += 1

    def wait(self, until: float) -> None:
        """As `Lanes.wait`: compute stalls, and the network runs at its full rate."""
        begun = self.clock
        super().wait(until)
        self._sum(begun, self.clock, 1.0)

    def finish(self) -> list[Span]:
        """Runs the remaining all-reduces; returns the spans of the network lane."""
        self._sum(self.clock, math.inf, 1.0)
        return self._spans

    def _sum(self, clock: float, until: float, share: float) -> None:
        """Advances the network from ``clock`` to ``until``."""
        while self._waiting:
            first = self._waiting[0]
            end = clock + first.seconds / share
            if end > until:
                first.seconds -= (until - clock) * share
                return
            self._spans.append(Span(Lane.NETWORK, first.name, self._begun, end, first.nbytes))
            self._waiting.popleft()
            self._begun = clock = end
