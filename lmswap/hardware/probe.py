"""Measures the link to a tier: copies of the engine that will move the bytes, in seconds of its own records.

One copy at a time at several sizes, both directions at once, and each direction while the device runs convolutions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from lmswap.errors import TierError, TransferError
from lmswap.hardware.microbench import convolution
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.machine import Link, Rate

if TYPE_CHECKING:
    import torch

    from lmswap.runtime._C import Engine, TransferRecord

# Tokens of copies out, or of what is copied in; and copies in.
_SwapIn: TypeAlias = "tuple[torch.Tensor, int]"  # token, transfer
_Burst: TypeAlias = "tuple[list[torch.Tensor], list[_SwapIn]]"

_SIZES = (2**18, 2**20, 2**22, 2**24, 2**26)
_REPEATS = 3
_PAGE_BYTES = 4096
_BURST_BYTES = 2**24  # per copy where several follow each other, if there is room for them
_BURST_COPIES = 12  # at most; fewer where they would take longer than this:
_BURST_SECONDS = 0.1
MEASURED_BYTES = max(_SIZES[-1], _BURST_COPIES * _BURST_BYTES)  # of the tier, by `measure_link`, if it has them
_MIN_BYTES = _BURST_COPIES * _SIZES[0]
_BOTH_COPIES = 6  # of the faster direction
# Alone and beside compute; one pair alone moves by tens of percent on a virtual machine. The first number is enough
# where they differ by no more than the last.
_MIN_PAIRS, _MAX_PAIRS, _CLOSE = 3, 5, 0.1
# A slow disk ends the series early: beyond its last point a rate is linear.
_MAX_SECONDS_PER_SIZE = 0.5
_MAX_WAIT_SECONDS = 60.0  # for copies that take 1 s on a disk of 100 MB/s; longer is a failure, not a measurement
_MIN_FACTOR = 0.05


def measure_link(device: torch.device, tier: str, where: str, room_bytes: int) -> Link:
    """Measure the link from ``device`` to ``tier`` at ``where`` (see `open_tier`); takes one to four seconds.

    Of the tier's ``room_bytes`` it takes `MEASURED_BYTES`, or all of a smaller tier, with smaller copies.

    Raises:
        TierError: the tier cannot be opened, or has no room for copies of a meaningful size.
        DriverError: the device's driver failed.
        TransferError: copies failed, or did not end.
    """
    if room_bytes < _MIN_BYTES:
        raise TierError(
            f"the {tier} tier has room for {format_bytes(room_bytes)}; to measure its link takes "
            f"{format_bytes(_MIN_BYTES)}: make room{', or name another disk_directory' * (tier == 'disk')}"
        )
    with _opened(device, tier, where, min(MEASURED_BYTES, room_bytes // _PAGE_BYTES * _PAGE_BYTES)) as probe:
        out_points, in_points = probe.alone()
        out_rate, in_rate = Rate(out_points), Rate(in_points)
        seconds = out_rate.seconds(probe.burst_bytes), in_rate.seconds(probe.burst_bytes)
        both_factor = probe.both_factor(*seconds)
        busy_factor, compute_factor = probe.busy_factors(convolution(device), *seconds)
        return Link(out_rate, in_rate, both_factor, busy_factor, compute_factor)


def round_trip_seconds(device: torch.device, tier: str, where: str) -> float:
    """What 64 MiB take from ``device`` to ``tier`` and back, sooner known than all of the link.

    Raises:
        As `measure_link`.
    """
    with _opened(device, tier, where, _SIZES[-1]) as probe:
        return probe.round_trip_seconds()


@contextmanager
def _opened(device: torch.device, tier: str, where: str, capacity_bytes: int) -> Iterator[LinkProbe]:
    from lmswap.runtime import _C
    from lmswap.runtime.tiers import open_tier

    engine = _C.Engine(driver="cuda" if device.type == "cuda" else "host", device=device.index or 0)
    try:
        open_tier(engine, tier, capacity_bytes, where)
        engine.reserve(tier, capacity_bytes)
        yield LinkProbe(device, tier, engine, capacity_bytes)
    finally:
        engine.close()


class LinkProbe:
    """Drives the engine's lanes with buffers of known sizes and reads its records; holds ``capacity_bytes`` at most.

    What is copied are ReLU'd normally distributed values: how long it takes to compress bytes depends on them.
    """

    def __init__(self, device: torch.device, tier: str, engine: Engine, capacity_bytes: int) -> None:
        import torch

        self._tier, self._engine = tier, engine
        self._sizes = [nbytes for nbytes in _SIZES if nbytes <= capacity_bytes]
        self.burst_bytes = min(_BURST_BYTES, capacity_bytes // _BURST_COPIES // _PAGE_BYTES * _PAGE_BYTES)
        self._out_buffer, self._in_buffer = (_device_buffer(device, self._sizes[-1]) for _ in range(2))
        self._out_buffer.view(torch.float32).normal_(generator=torch.Generator(device).manual_seed(0)).relu_()
        self._stream = _stream(device)

    def alone(self) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
        """Points (nbytes, seconds) of copies out and in, with nothing else under way."""
        points: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
        for nbytes in self._sizes:
            seconds: tuple[list[float], list[float]] = ([], [])
            started = time.perf_counter()
            while len(seconds[0]) < _REPEATS + 1:
                for record in self._round_trip(nbytes):
                    seconds[record.is_in].append(record.end_seconds - record.start_seconds)
            for direction in (0, 1):
                typical = statistics.median(seconds[direction][1:])  # the first one warms up
                # Noise can make a larger copy look faster than a smaller one; a rate ascends.
                slowest = points[direction][-1][1] if points[direction] else 1e-9
                points[direction].append((nbytes, max(typical, slowest)))
            if time.perf_counter() - started > _MAX_SECONDS_PER_SIZE:
                break
        return tuple(points[0]), tuple(points[1])

    def round_trip_seconds(self) -> float:
        """What the largest copy takes out and back in, at its best."""
        round_trips = [self._round_trip(self._sizes[-1]) for _ in range(_REPEATS + 1)]  # the first one warms up
        return min(sum(record.end_seconds - record.start_seconds for record in records) for records in round_trips)

    def both_factor(self, out_seconds: float, in_seconds: float) -> float:
        """The share of its own rate that each direction keeps while the other runs.

        With W seconds of copies alone in the shorter direction and W + R in the longer, both started together end
        after W / factor + R. The arguments are the seconds of one copy of a burst.
        """
        fastest = min(out_seconds, in_seconds)
        num_out, num_in = (max(1, round(_BOTH_COPIES * fastest / seconds)) for seconds in (out_seconds, in_seconds))
        stored = self._fill_tier(num_in)
        outgoing: list[torch.Tensor] = []
        incoming: list[_SwapIn] = []
        for number in range(max(num_out, num_in)):
            if number < num_in:
                incoming.append(self._copy_in(stored[number], self.burst_bytes))
            if number < num_out:
                outgoing.append(self._copy_out((num_in + number) * self.burst_bytes, self.burst_bytes))
        self._wait(outgoing, incoming)
        records = self._finished(num_out + num_in)
        makespan = max(r.end_seconds for r in records) - min(r.start_seconds for r in records)
        shorter, longer = sorted((num_out * out_seconds, num_in * in_seconds))
        return _share(shorter, makespan - (longer - shorter))

    def busy_factors(
        self, compute: Callable[[int], float], out_seconds: float, in_seconds: float
    ) -> tuple[float, float]:
        """The share of its rate that a copy keeps while ``compute`` runs, and the share of its speed compute keeps.

        Of copies the direction that loses more counts, of compute what it keeps over a copy out and the same copy in.
        ``compute(n)`` runs an op n times and returns the seconds. The other arguments are those of `both_factor`.
        """
        compute(1)  # warms up
        run_seconds = compute(_REPEATS) / _REPEATS
        copy_factors, compute_factors = [], []
        for begin, seconds in ((self._copies_out, out_seconds), (self._copies_in, in_seconds)):
            start = begin(max(1, min(_BURST_COPIES, round(_BURST_SECONDS / seconds))))
            copying, computing = self._while_computing(start, compute, run_seconds)
            copy_factors.append(copying)
            compute_factors.append(computing)
        out_lost, in_lost = (1 - factor for factor in compute_factors)
        lost_seconds = out_seconds * out_lost + in_seconds * in_lost
        return min(copy_factors), 1 - lost_seconds / (out_seconds + in_seconds)

    def _while_computing(
        self, start: Callable[[], _Burst], compute: Callable[[int], float], run_seconds: float
    ) -> tuple[float, float]:
        """See `busy_factors`; of one direction, whose copies ``start`` starts."""
        alone_seconds = self._end(start())
        # What is timed lies within the copies, if either loses half.
        num_timed = max(1, int(alone_seconds / 2 / run_seconds))
        pairs: list[tuple[float, float]] = []
        before_seconds = compute(num_timed)
        while len(pairs) < _MIN_PAIRS or (len(pairs) < _MAX_PAIRS and not _are_close(pairs)):
            alone_seconds = self._end(start())
            burst = start()
            overlapped_seconds = compute(num_timed)
            self._compute_until_copied(compute, math.ceil(2 * alone_seconds / run_seconds) + 1)
            copy_seconds = self._end(burst)
            del burst  # gives its room in the tier back
            after_seconds = compute(num_timed)
            compute_seconds = (before_seconds + after_seconds) / 2  # others' load may have changed meanwhile
            pairs.append((_share(alone_seconds, copy_seconds), _share(compute_seconds, overlapped_seconds)))
            before_seconds = after_seconds
        copying, computing = zip(*pairs, strict=True)
        return statistics.median(copying), statistics.median(computing)

    def _compute_until_copied(self, compute: Callable[[int], float], max_runs: int) -> None:
        """Runs ``compute`` until the copies that are under way have ended."""
        for _ in range(max_runs):
            if self._engine.is_idle():
                return
            compute(1)

    def _copies_out(self, count: int) -> Callable[[], _Burst]:
        """A function that starts ``count`` copies out."""
        return lambda: ([self._copy_out(number * self.burst_bytes, self.burst_bytes) for number in range(count)], [])

    def _copies_in(self, count: int) -> Callable[[], _Burst]:
        """A function that starts ``count`` copies in, of the same bytes each time."""
        stored = self._fill_tier(count)
        return lambda: (stored, [self._copy_in(token, self.burst_bytes) for token in stored])

    def _end(self, burst: _Burst) -> float:
        """Waits for a burst; from the start of its first copy to the end of its last."""
        outgoing, incoming = burst
        self._wait([] if incoming else outgoing, incoming)
        records = self._finished(len(outgoing))
        return max(r.end_seconds for r in records) - min(r.start_seconds for r in records)

    def _fill_tier(self, count: int) -> list[torch.Tensor]:
        """Tokens of what lies in the tier, to be copied in."""
        burst = self._copies_out(count)()
        self._end(burst)
        return burst[0]

    def _wait(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[_SwapIn]) -> None:
        for token, transfer in incoming:
            self._engine.in_done(int(token), transfer, self._stream)
        for token in outgoing:
            self._engine.out_done(int(token), self._stream)

    def _round_trip(self, nbytes: int) -> list[TransferRecord]:
        token = self._copy_out(0, nbytes)
        self._wait([token], [])
        left = self._finished(1)
        self._wait([], [self._copy_in(token, nbytes)])
        return left + self._finished(1)

    def _copy_out(self, offset: int, nbytes: int) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack

        capsule = self._engine.out_start(0, self._tier, offset, self._out_buffer.data_ptr(), nbytes, self._stream)
        token: torch.Tensor = from_dlpack(capsule)
        return token

    def _copy_in(self, token: torch.Tensor, nbytes: int) -> _SwapIn:
        return token, self._engine.in_start(0, int(token), self._in_buffer.data_ptr(), nbytes, self._stream)

    def _finished(self, count: int) -> list[TransferRecord]:
        """The next ``count`` records; a wait on a CUDA stream returns before the copy has ended."""
        records: list[TransferRecord] = []
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while len(records) < count:
            if time.monotonic() > deadline:
                waited = f"{count - len(records)} of {count} copies did not end in {_MAX_WAIT_SECONDS:.0f} s"
                raise TransferError(f"the {self._tier} tier cannot be measured: {waited}")
            records += self._engine.take_records()
            if len(records) < count:
                time.sleep(1e-4)
        return records


def _are_close(pairs: Sequence[tuple[float, float]]) -> bool:
    return all(max(shares) - min(shares) <= _CLOSE for shares in zip(*pairs, strict=True))


def _share(part: float, whole: float) -> float:
    """``part / whole`` as a factor: measurements are noisy, and a factor is more than 0 and at most 1."""
    return min(1.0, max(_MIN_FACTOR, part / max(whole, 1e-9)))


def _device_buffer(device: torch.device, nbytes: int) -> torch.Tensor:
    """Touched bytes on ``device`` that begin on a page, as those of the heap and of the CUDA allocator do."""
    import torch

    flat = torch.ones(nbytes + _PAGE_BYTES, dtype=torch.uint8, device=device)
    return flat[-flat.data_ptr() % _PAGE_BYTES :][:nbytes]


def _stream(device: torch.device) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
