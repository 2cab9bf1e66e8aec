"""The rate of all-reduce on these ranks, and its mutual slowdown with compute: samples of both → a network.

Several sizes are summed with nothing else under way; buckets of DistributedDataParallel's size also while all ranks
compute. Where that shares cores, as on a CPU, both are slower then.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import distributed

from benchmarks.distributed.prediction.network import Network
from benchmarks.distributed.ranks import Ranks
from lmswap.hardware.microbench import convolution
from lmswap.ir.machine import Rate

BUCKET_BYTES = 25 * 2**20
# Two ranks that sum the smallest hand 4 KiB to each other, as 256 do of the first bucket, of 1 MiB.
_SIZES = (2**13, 2**17, 2**20, 5 * 2**20, BUCKET_BYTES)
_BURST_SECONDS = 0.25  # of sums alone; beside compute they take longer
_MIN_FACTOR = 0.05


class SumProbe:
    """Takes samples in turns with other things; all ranks call the same at the same time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._values = torch.zeros(BUCKET_BYTES // 4, device=ranks.device)
        self._compute = convolution(ranks.device)
        self._seconds: dict[int, list[float]] = defaultdict(list)  # by bytes of a sum
        self._factors: list[tuple[float, float]] = []
        self._sum(BUCKET_BYTES, 1)  # makes connections
        self._compute(1)
        self._count = max(1, round(_BURST_SECONDS / self._sum(BUCKET_BYTES, 3)))

    def sample(self) -> None:
        """Sums each size alone, and some buckets alone and beside compute."""
        for nbytes in _SIZES:
            self._seconds[nbytes].append(self._sum(nbytes, 3))
        self._factors.append(self._sample_factors())

    def network(self) -> Network:
        """The network by the medians of all samples: these ranks as one node, whose sums are rings of gloo or NCCL."""
        points: list[tuple[int, float]] = []
        for nbytes, found in self._seconds.items():
            seconds = statistics.median(found) / (2 * (self._ranks.size - 1))  # of a round
            # Noise can make a larger message look faster than a smaller one; a rate ascends.
            points.append((nbytes // self._ranks.size, max(seconds, points[-1][1] if points else 0.0)))
        busy, compute = (statistics.median(factors) for factors in zip(*self._factors, strict=True))
        size, rate = self._ranks.size, Rate(tuple(points))
        return Network(f"{size} ranks over {self._ranks.backend}", size, size, "ring", rate, None, busy, compute)

    def _sum(self, nbytes: int, count: int) -> float:
        """Seconds of one of ``count`` consecutive sums of ``nbytes``, of the slowest rank."""
        values = self._values[: nbytes // 4]
        distributed.barrier()
        with self._timed() as seconds:
            for _ in range(count):
                distributed.all_reduce(values)
        return max(self._ranks.gather(seconds[0])) / count

    def _sample_factors(self) -> tuple[float, float]:
        """The shares of their speed that sums and compute keep beside each other."""
        alone_seconds = self._sum(BUCKET_BYTES, self._count) * self._count
        distributed.barrier()
        run_seconds = self._compute(2) / 2
        distributed.barrier()
        begun = time.perf_counter()
        burst = _Burst(self._ranks, [distributed.all_reduce(self._values, async_op=True) for _ in range(self._count)])
        ends: list[float] = []
        while not burst.end:
            self._compute(1)
            ends.append(time.perf_counter())
        within = [end for end in ends if end <= burst.end[0]] or ends[:1]  # one at least
        computed = len(within) * run_seconds / (within[-1] - begun)
        found = self._ranks.gather((alone_seconds / (burst.end[0] - begun), computed))
        busy, compute = (statistics.fmean(factors) for factors in zip(*found, strict=True))
        return _factor(busy), _factor(compute)

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        seconds: list[float] = []
        begun = time.perf_counter()
        yield seconds
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)


class _Burst:
    """Sums under way; ``end`` has the time of the last one's end when that has come."""

    def __init__(self, ranks: Ranks, works: list[distributed.Work]) -> None:
        self.end: list[float] = []
        self._works = works
        self._stream = torch.cuda.Stream() if ranks.device.type == "cuda" else None
        threading.Thread(target=self._wait, name="burst", daemon=True).start()

    def _wait(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for work in self._works:
                work.wait()
            if self._stream is not None:
                self._stream.synchronize()
        self.end.append(time.perf_counter())


def _factor(share: float) -> float:
    """``share`` clamped to (0, 1]: measurements are noisy."""
    return min(1.0, max(_MIN_FACTOR, share))
