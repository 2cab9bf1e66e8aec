"""Samples of each rank: in training a shuffled epoch in shared batches, in validation all in turn.

The order follows from the seed and the epoch alone, so that a training goes on anywhere, on any rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from benchmarks.distributed.images import UNMOVED, Draw

Batch = list[Draw]


def draw_epoch(seed: int, epoch: int, num_samples: int) -> list[Draw]:
    """Every sample once, in the order of this epoch, each with the seed of its crop."""
    random = np.random.default_rng([seed, epoch])
    order, crops = random.permutation(num_samples), random.integers(2**31, size=num_samples)
    return list(zip(order.tolist(), crops.tolist(), strict=True))


def shard_epoch(draws: list[Draw], rank: int, size: int, batch: int) -> list[Batch]:
    """The batches of one rank: the epoch is cut into steps of ``size`` * ``batch`` samples, dealt out in turn.

    Ranks take equally many steps, each of equally many samples: what does not fill a step is left out. Another order
    in each epoch leaves out others.
    """
    step = size * batch
    whole = len(draws) - len(draws) % step
    return [draws[start + rank : start + step : size] for start in range(0, whole, step)]


def shard_validation(num_samples: int, rank: int, size: int, batch: int) -> list[Batch]:
    """The batches of one rank, of which the last may be short: all ranks together have every sample once."""
    mine = [(index, UNMOVED) for index in range(rank, num_samples, size)]
    return [mine[start : start + batch] for start in range(0, len(mine), batch)]


class Shards(Sampler[Batch]):
    """The training batches of one rank; `start` says of which epoch, before the loader is iterated."""

    def __init__(self, seed: int, num_samples: int, rank: int, size: int, batch: int) -> None:
        self._seed, self._num_samples = seed, num_samples
        self._rank, self._size, self._batch = rank, size, batch
        self._batches: list[Batch] = []

    @property
    def num_steps(self) -> int:
        """Number of steps of an epoch."""
        return self._num_samples // (self._size * self._batch)

    def start(self, epoch: int, step: int) -> None:
        """Selects the epoch and the first step to yield."""
        draws = draw_epoch(self._seed, epoch, self._num_samples)
        self._batches = shard_epoch(draws, self._rank, self._size, self._batch)[step:]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
