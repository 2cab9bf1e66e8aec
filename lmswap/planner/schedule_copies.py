"""Schedules the copies of chosen gaps within the budget: gaps → swaps with positions.

One pass over the step in simulated time. A swap out starts directly after the last use. The memory is released when the
copy has ended, or earlier, with a stall, where an op needs the bytes. A prefetch starts as late as it can still arrive
in time, in order of need: later, and then with a stall, where memory is full.

Release is in the segment that used the buffer last, which passes on a token, and in_start in the one that uses it next.
The search of csrc/planner also releases in a backward what its forward still copies.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmswap.analyze.liveness import Gap
from lmswap.ir.plan import Swap
from lmswap.ir.timeline import Lane
from lmswap.planner.lane_model import Lanes
from lmswap.planner.problem import Problem


@dataclass(eq=False, slots=True)
class _PendingSwap:
    """A gap during the pass. Positions are filled in as they are reached."""

    gap: Gap
    nbytes: int
    wish: int  # earliest position of the prefetch
    out_start: int | None = None
    out_end: float = 0.0
    release: int | None = None
    in_start: int | None = None
    in_end: float = 0.0
    is_kept: bool = False  # not swapped: needed before its memory was free for a single op


def schedule_copies(
    problem: Problem,
    gaps: Sequence[Gap],
    *,
    wishes: Mapping[Gap, int] | None = None,
    sync_out: bool = False,
    sync_in: bool = False,
    even_if_late: bool = False,
) -> tuple[Swap, ...]:
    """Swaps for ``gaps`` within the budget, in order of need, offsets still 0; those that free nothing are left out.

    Args:
        problem: `Problem.fits` holds for ``gaps``.
        gaps: of swappable buffers.
        wishes: preferred positions of prefetches; where None, each starts as late as it can arrive in time.
        sync_out: compute waits for each copy out at once.
        sync_in: compute waits for each copy in where it starts.
        even_if_late: leaves no swap out, also none whose copy out ends too late to free memory.
    """
    wishes = wishes or latest_starts(problem, gaps)
    return _Placement(problem, gaps, wishes, sync_out=sync_out, sync_in=sync_in, even_if_late=even_if_late).swaps()


def latest_starts(problem: Problem, gaps: Sequence[Gap]) -> dict[Gap, int]:
    """The last position of each prefetch that arrives in time, if nothing stalls and the in lane is FIFO."""
    starts = problem.memory.op_starts
    link = problem.planned_link
    wishes, next_copy = {}, float("inf")
    for gap in sorted(gaps, key=_need, reverse=True):
        next_copy = min(starts[gap.before], next_copy) - link.in_rate.seconds(problem.nbytes(gap.buffer))
        wishes[gap] = bisect_right(starts, next_copy) - 1
    return wishes


def _need(gap: Gap) -> tuple[int, int]:
    return gap.before, gap.buffer


class _Placement:
    def __init__(
        self,
        problem: Problem,
        gaps: Sequence[Gap],
        wishes: Mapping[Gap, int],
        *,
        sync_out: bool,
        sync_in: bool,
        even_if_late: bool,
    ) -> None:
        self._problem, self._sync_out, self._sync_in = problem, sync_out, sync_in
        self._even_if_late = even_if_late
        self._trips = [self._trip(gap, wishes[gap]) for gap in sorted(gaps, key=_need)]
        self._leaving = _by_position((trip.gap.after + 1, trip) for trip in self._trips)
        self._wishing = _by_position((trip.wish, trip) for trip in self._trips)
        self._needed = _by_position((trip.gap.before, trip) for trip in self._trips)
        self._limited = _by_position((problem.segments[trip.gap.after].stop, trip) for trip in self._trips)
        self._link = problem.planned_link
        self._lanes = Lanes(problem.machine.host)
        self._resident_bytes = 0
        self._copies: dict[int, _PendingSwap] = {}  # by buffer: its last copy out
        self._latest: dict[int, _PendingSwap] = {}  # by buffer: its last prefetch
        self._outgoing: OrderedDict[_PendingSwap, None] = OrderedDict()  # queued, not yet released; by end
        self._ripe: list[tuple[int, int, _PendingSwap]] = []  # heap by need: prefetches that may start
        # Lower bound of resident bytes by op: buffers of later gaps count as non-resident in the whole gap, early
        # prefetches as resident. While this is within the budget, releasing on demand always frees enough.
        self._promised = problem.curve_without(gaps)

    def swaps(self) -> tuple[Swap, ...]:
        memory = self._problem.memory
        for position, seconds in enumerate(memory.costs.seconds):
            self._resident_bytes -= memory.freed_bytes[position]
            self._start_outs(position)
            self._release_finished(position)
            self._release_on_demand(position)
            self._start_ins(position)
            for trip in self._needed.get(position, ()):
                self._lanes.wait(trip.in_end)
            self._resident_bytes += memory.allocated_bytes[position]
            self._lanes.queue_op()
            self._lanes.run(seconds)
        swaps = [self._swap(trip) for trip in self._trips if not trip.is_kept]
        return tuple(sorted(swaps, key=lambda swap: swap.first_use))

    def _trip(self, gap: Gap, wish: int) -> _PendingSwap:
        earliest = max(gap.after + 1, self._problem.segments[gap.before].start)
        return _PendingSwap(gap, self._problem.nbytes(gap.buffer), min(max(wish, earliest), gap.before))

    def _start_outs(self, position: int) -> None:
        for trip in self._leaving.get(position, ()):
            if self._has_good_copy(trip):
                self._free(trip, position)
                continue
            trip.out_start = position
            self._lanes.queue_copy()
            _, trip.out_end = self._lanes.copy(Lane.OUT, self._link, trip.nbytes)
            self._copies[trip.gap.buffer] = trip
            self._outgoing[trip] = None
            if self._sync_out:
                self._stall_and_free(trip, position)

    def _has_good_copy(self, trip: _PendingSwap) -> bool:
        """Whether an earlier host copy is valid, and its token is in the segment that uses the buffer now."""
        buffer, segments = trip.gap.buffer, self._problem.segments
        if buffer not in self._copies or self._copies[buffer].is_kept:
            return False
        writes = self._problem.memory.ranges[buffer].writes
        is_unchanged = bisect_right(writes, self._copies[buffer].gap.after) == bisect_right(writes, trip.gap.after)
        return is_unchanged and segments[self._latest[buffer].gap.before] == segments[trip.gap.after]

    def _release_finished(self, position: int) -> None:
        """Releases finished copies; at a segment's end, unfinished ones are kept if they fit, or else stall."""
        for trip in self._needed.get(position, ()):
            if trip.release is None and not trip.is_kept:
                self._keep(trip, position)
        while self._outgoing and (first := next(iter(self._outgoing))).out_end <= self._lanes.clock:
            self._stall_and_free(first, position)
        for trip in reversed(self._limited.get(position, ())):  # those needed first are kept first
            if trip.release is None and not trip.is_kept:
                if self._has_room(trip, position) and not self._even_if_late:
                    self._keep(trip, position)
                else:
                    self._stall_and_free(trip, position)

    def _release_on_demand(self, position: int) -> None:
        returning = sum(trip.nbytes for trip in self._needed.get(position, ()) if self._is_away(trip))
        while self._resident_bytes + returning + self._op_bytes(position) > self._problem.budget_bytes:
            self._stall_and_free(next(iter(self._outgoing)), position)

    def _start_ins(self, position: int) -> None:
        for trip in self._wishing.get(position, ()):
            heapq.heappush(self._ripe, (trip.gap.before, trip.gap.buffer, trip))
        while self._ripe:
            trip = self._ripe[0][-1]
            if not trip.is_kept:
                if trip.gap.before > position and not self._has_room(trip, position):
                    return
                if trip.release is None:
                    self._keep(trip, position)
                else:
                    self._bring_back(trip, position)
            heapq.heappop(self._ripe)

    def _has_room(self, trip: _PendingSwap, position: int) -> bool:
        """Whether the buffer fits from here to its next use."""
        budget_bytes = self._problem.budget_bytes
        arriving = trip.nbytes if self._is_away(trip) else 0
        return (
            self._resident_bytes + arriving + self._op_bytes(position) <= budget_bytes
            and int(self._promised[position : trip.gap.before].max()) + trip.nbytes <= budget_bytes
        )

    def _op_bytes(self, position: int) -> int:
        memory = self._problem.memory
        return memory.allocated_bytes[position] + memory.costs.scratch_bytes[position]

    def _is_away(self, trip: _PendingSwap) -> bool:
        return trip.release is not None and trip.in_start is None

    def _stall_and_free(self, trip: _PendingSwap, position: int) -> None:
        self._lanes.wait(trip.out_end)
        del self._outgoing[trip]
        self._free(trip, position)

    def _free(self, trip: _PendingSwap, position: int) -> None:
        trip.release = position
        self._resident_bytes -= trip.nbytes

    def _keep(self, trip: _PendingSwap, position: int) -> None:
        """Cancels a swap whose copy out is unfinished: the buffer is kept until its next use."""
        trip.is_kept = True
        del self._outgoing[trip]
        self._promised[position : trip.gap.before] += trip.nbytes

    def _bring_back(self, trip: _PendingSwap, position: int) -> None:
        self._resident_bytes += trip.nbytes
        self._promised[position : trip.gap.before] += trip.nbytes
        if trip.release == position and not self._even_if_late:
            trip.is_kept, trip.release = True, None
            return
        trip.in_start = position
        self._latest[trip.gap.buffer] = trip
        self._lanes.queue_copy()
        _, trip.in_end = self._lanes.copy(Lane.IN, self._link, trip.nbytes)
        if self._sync_in:
            self._lanes.wait(trip.in_end)

    def _swap(self, trip: _PendingSwap) -> Swap:
        assert trip.release is not None and trip.in_start is not None
        first_use = trip.in_start if self._sync_in else trip.gap.before
        return Swap(trip.gap.buffer, self._problem.tier.name, 0, trip.out_start, trip.release, trip.in_start, first_use)


def _by_position(pairs: Iterable[tuple[int, _PendingSwap]]) -> dict[int, list[_PendingSwap]]:
    found: dict[int, list[_PendingSwap]] = defaultdict(list)
    for position, trip in pairs:
        found[position].append(trip)
    return found
