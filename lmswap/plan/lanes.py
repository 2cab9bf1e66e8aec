"""When does a copy end? The clocks of compute and of the two copy lanes, for the simulator and for planners."""

from __future__ import annotations

from bisect import bisect_right

from lmswap.ir.machine import Link
from lmswap.ir.timeline import Lane

_OTHER = {Lane.OUT: Lane.IN, Lane.IN: Lane.OUT}


class Lanes:
    """Compute and two first-in-first-out copy lanes, in seconds from the start of the step.

    Where a link's ``both_factor`` f is below 1, the copy that was queued first keeps its rate and one in the other
    direction runs at 2f - 1 of its own beside it: together they move what the link moves, and at f = 0.5 (half duplex)
    one waits for the other.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._starts: dict[Lane, list[float]] = {Lane.OUT: [], Lane.IN: []}
        self._ends: dict[Lane, list[float]] = {Lane.OUT: [], Lane.IN: []}

    def run(self, seconds: float) -> None:
        """Compute is busy for ``seconds``."""
        self.clock += seconds

    def wait(self, until: float) -> None:
        """Compute stalls until a copy's end, if that is still to come."""
        self.clock = max(self.clock, until)

    def copy(self, lane: Lane, link: Link, nbytes: int) -> tuple[float, float]:
        """Queues a copy on a lane of ``link``; returns when it starts and ends."""
        rate = link.out_rate if lane is Lane.OUT else link.in_rate
        ends = self._ends[lane]
        start = max(self.clock, ends[-1]) if ends else self.clock
        end = self._end(start, rate.seconds(nbytes), max(0.0, 2 * link.both_factor - 1), _OTHER[lane])
        self._starts[lane].append(start)
        ends.append(end)
        return start, end

    def _end(self, start: float, seconds: float, share: float, other: Lane) -> float:
        """End of a copy of ``seconds`` that progresses at ``share`` of its rate while ``other`` is busy."""
        if share == 1.0:
            return start + seconds
        now, left = start, seconds
        for index in range(bisect_right(self._ends[other], start), len(self._ends[other])):
            busy_start, busy_end = self._starts[other][index], self._ends[other][index]
            if now + left <= busy_start:
                break
            if busy_start > now:
                now, left = busy_start, left - (busy_start - now)
            progress = (busy_end - now) * share
            if progress >= left:
                return now + left / share
            now, left = busy_end, left - progress
        return now + left
