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
    preferred_start: int  # earliest position of the prefetch
    out_start: int | None = None
    out_end: float = 0.0
    release: int | None = None
    in_start: int | None = None
    in_end: float = 0.0
    is_cancelled: bool = False  # not swapped: needed before its memory was free for a single op


def schedule_copies(
    problem: Problem,
    gaps: Sequence[Gap],
    *,
    preferred_starts: Mapping[Gap, int] | None = None,
    sync_out: bool = False,
    sync_in: bool = False,
    never_cancel: bool = False,
) -> tuple[Swap, ...]:
    """Swaps for ``gaps`` within the budget, in order of need, offsets still 0; those that free nothing are left out.

    Args:
        problem: `Problem.fits` holds for ``gaps``.
        gaps: of swappable buffers.
        preferred_starts: positions of prefetches; where None, each starts as late as it can arrive in time.
        sync_out: compute waits for each copy out at once.
        sync_in: compute waits for each copy in where it starts.
        never_cancel: leaves no swap out, also none whose copy out ends too late to free memory.
    """
    preferred_starts = preferred_starts or latest_starts(problem, gaps)
    return _CopyScheduler(
        problem, gaps, preferred_starts, sync_out=sync_out, sync_in=sync_in, never_cancel=never_cancel
    ).swaps()


def latest_starts(problem: Problem, gaps: Sequence[Gap]) -> dict[Gap, int]:
    """The last position of each prefetch that arrives in time, if nothing stalls and the in lane is FIFO."""
    starts = problem.memory.op_starts
    link = problem.planned_link
    preferred_starts, next_copy = {}, float("inf")
    for gap in sorted(gaps, key=_by_next_use_then_id, reverse=True):
        next_copy = min(starts[gap.before], next_copy) - link.in_rate.seconds(problem.nbytes(gap.buffer))
        preferred_starts[gap] = bisect_right(starts, next_copy) - 1
    return preferred_starts


def _by_next_use_then_id(gap: Gap) -> tuple[int, int]:
    return gap.before, gap.buffer


class _CopyScheduler:
    def __init__(
        self,
        problem: Problem,
        gaps: Sequence[Gap],
        preferred_starts: Mapping[Gap, int],
        *,
        sync_out: bool,
        sync_in: bool,
        never_cancel: bool,
    ) -> None:
        self._problem, self._sync_out, self._sync_in = problem, sync_out, sync_in
        self._never_cancel = never_cancel
        self._swaps = [self._pending_swap(gap, preferred_starts[gap]) for gap in sorted(gaps, key=_by_next_use_then_id)]
        self._by_gap_start = _by_position((pending.gap.after + 1, pending) for pending in self._swaps)
        self._by_preferred_start = _by_position((pending.preferred_start, pending) for pending in self._swaps)
        self._by_next_use = _by_position((pending.gap.before, pending) for pending in self._swaps)
        self._by_segment_end = _by_position(
            (problem.segments[pending.gap.after].stop, pending) for pending in self._swaps
        )
        self._link = problem.planned_link
        self._lanes = Lanes(problem.machine.host)
        self._resident_bytes = 0
        self._last_swap_out: dict[int, _PendingSwap] = {}  # by buffer: its last copy out
        self._last_prefetch: dict[int, _PendingSwap] = {}  # by buffer: its last prefetch
        self._unreleased: OrderedDict[_PendingSwap, None] = OrderedDict()  # queued, not yet released; by end
        self._ready_prefetches: list[tuple[int, int, _PendingSwap]] = []  # heap by need: prefetches that may start
        # Lower bound of resident bytes by op: buffers of later gaps count as non-resident in the whole gap, early
        # prefetches as resident. While this is within the budget, releasing on demand always frees enough.
        self._reserved = problem.curve_without(gaps)

    def swaps(self) -> tuple[Swap, ...]:
        memory = self._problem.memory
        for position, seconds in enumerate(memory.costs.seconds):
            self._resident_bytes -= memory.freed_bytes[position]
            self._start_swap_outs(position)
            self._release_finished(position)
            self._release_on_demand(position)
            self._start_prefetches(position)
            for pending in self._by_next_use.get(position, ()):
                self._lanes.wait(pending.in_end)
            self._resident_bytes += memory.allocated_bytes[position]
            self._lanes.queue_op()
            self._lanes.run(seconds)
        swaps = [self._to_swap(pending) for pending in self._swaps if not pending.is_cancelled]
        return tuple(sorted(swaps, key=lambda swap: swap.first_use))

    def _pending_swap(self, gap: Gap, preferred_start: int) -> _PendingSwap:
        earliest = max(gap.after + 1, self._problem.segments[gap.before].start)
        return _PendingSwap(gap, self._problem.nbytes(gap.buffer), min(max(preferred_start, earliest), gap.before))

    def _start_swap_outs(self, position: int) -> None:
        for pending in self._by_gap_start.get(position, ()):
            if self._has_valid_copy(pending):
                self._release(pending, position)
                continue
            pending.out_start = position
            self._lanes.queue_copy()
            _, pending.out_end = self._lanes.copy(Lane.OUT, self._link, pending.nbytes)
            self._last_swap_out[pending.gap.buffer] = pending
            self._unreleased[pending] = None
            if self._sync_out:
                self._stall_and_release(pending, position)

    def _has_valid_copy(self, pending: _PendingSwap) -> bool:
        """Whether an earlier host copy is valid, and its token is in the segment that uses the buffer now."""
        buffer, segments = pending.gap.buffer, self._problem.segments
        if buffer not in self._last_swap_out or self._last_swap_out[buffer].is_cancelled:
            return False
        writes = self._problem.memory.ranges[buffer].writes
        is_unchanged = bisect_right(writes, self._last_swap_out[buffer].gap.after) == bisect_right(
            writes, pending.gap.after
        )
        return is_unchanged and segments[self._last_prefetch[buffer].gap.before] == segments[pending.gap.after]

    def _release_finished(self, position: int) -> None:
        """Releases finished copies; at a segment's end, unfinished ones are kept if they fit, or else stall."""
        for pending in self._by_next_use.get(position, ()):
            if pending.release is None and not pending.is_cancelled:
                self._cancel(pending, position)
        while self._unreleased and (first := next(iter(self._unreleased))).out_end <= self._lanes.clock:
            self._stall_and_release(first, position)
        for pending in reversed(self._by_segment_end.get(position, ())):  # those needed first are cancelled first
            if pending.release is None and not pending.is_cancelled:
                if self._fits(pending, position) and not self._never_cancel:
                    self._cancel(pending, position)
                else:
                    self._stall_and_release(pending, position)

    def _release_on_demand(self, position: int) -> None:
        prefetch_bytes = sum(
            pending.nbytes for pending in self._by_next_use.get(position, ()) if self._is_offloaded(pending)
        )
        while self._resident_bytes + prefetch_bytes + self._op_bytes(position) > self._problem.budget_bytes:
            self._stall_and_release(next(iter(self._unreleased)), position)

    def _start_prefetches(self, position: int) -> None:
        for pending in self._by_preferred_start.get(position, ()):
            heapq.heappush(self._ready_prefetches, (pending.gap.before, pending.gap.buffer, pending))
        while self._ready_prefetches:
            pending = self._ready_prefetches[0][-1]
            if not pending.is_cancelled:
                if pending.gap.before > position and not self._fits(pending, position):
                    return
                if pending.release is None:
                    self._cancel(pending, position)
                else:
                    self._prefetch(pending, position)
            heapq.heappop(self._ready_prefetches)

    def _fits(self, pending: _PendingSwap, position: int) -> bool:
        """Whether the buffer fits from here to its next use."""
        budget_bytes = self._problem.budget_bytes
        prefetch_bytes = pending.nbytes if self._is_offloaded(pending) else 0
        return (
            self._resident_bytes + prefetch_bytes + self._op_bytes(position) <= budget_bytes
            and int(self._reserved[position : pending.gap.before].max()) + pending.nbytes <= budget_bytes
        )

    def _op_bytes(self, position: int) -> int:
        memory = self._problem.memory
        return memory.allocated_bytes[position] + memory.costs.scratch_bytes[position]

    def _is_offloaded(self, pending: _PendingSwap) -> bool:
        return pending.release is not None and pending.in_start is None

    def _stall_and_release(self, pending: _PendingSwap, position: int) -> None:
        self._lanes.wait(pending.out_end)
        del self._unreleased[pending]
        self._release(pending, position)

    def _release(self, pending: _PendingSwap, position: int) -> None:
        pending.release = position
        self._resident_bytes -= pending.nbytes

    def _cancel(self, pending: _PendingSwap, position: int) -> None:
        """Cancels a swap whose copy out is unfinished: the buffer is kept until its next use."""
        pending.is_cancelled = True
        del self._unreleased[pending]
        self._reserved[position : pending.gap.before] += pending.nbytes

    def _prefetch(self, pending: _PendingSwap, position: int) -> None:
        self._resident_bytes += pending.nbytes
        self._reserved[position : pending.gap.before] += pending.nbytes
        if pending.release == position and not self._never_cancel:
            pending.is_cancelled, pending.release = True, None
            return
        pending.in_start = position
        self._last_prefetch[pending.gap.buffer] = pending
        self._lanes.queue_copy()
        _, pending.in_end = self._lanes.copy(Lane.IN, self._link, pending.nbytes)
        if self._sync_in:
            self._lanes.wait(pending.in_end)

    def _to_swap(self, pending: _PendingSwap) -> Swap:
        assert pending.release is not None and pending.in_start is not None
        first_use = pending.in_start if self._sync_in else pending.gap.before
        return Swap(
            pending.gap.buffer,
            self._problem.tier.name,
            0,
            pending.out_start,
            pending.release,
            pending.in_start,
            first_use,
        )


def _by_position(pairs: Iterable[tuple[int, _PendingSwap]]) -> dict[int, list[_PendingSwap]]:
    found: dict[int, list[_PendingSwap]] = defaultdict(list)
    for position, pending in pairs:
        found[position].append(pending)
    return found
