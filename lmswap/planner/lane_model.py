"""Time model of compute and the two copy lanes, for the simulator and for planners."""

from __future__ import annotations

from lmswap.ir.machine import Host, Link
from lmswap.ir.timeline import Lane


class Lanes:
    """Compute and two first-in-first-out copy lanes, in seconds from the start of the step.

    Where a link's ``both_factor`` f is below 1, the copy that was queued first keeps its rate and a simultaneous one
    in the other direction runs at 2f - 1 of its rate: together they use the whole link, and at f = 0.5 (half duplex) or
    less one waits for the other. While either lane copies, compute runs at the link's ``compute_factor`` of its
    speed.

    A ``host`` queues everything in order, ahead of compute, which can start an op only once it is queued.
    """

    def __init__(self, host: Host | None) -> None:
        self.clock = 0.0
        self._host = host or Host(0.0, 0.0)
        self._queued = 0.0  # when the host has queued everything so far
        self._out_end = self._in_end = 0.0  # of the last copy queued
        self._compute_factor = 1.0  # while that copy runs

    def queue_copy(self) -> None:
        """Advances the host by one copy; compute waits for it if it has no other work."""
        self._queue(self._host.copy_seconds)

    def queue_op(self) -> None:
        """Advances the host by one op; compute waits for it if it has no other work."""
        self._queue(self._host.op_seconds)

    def _queue(self, seconds: float) -> None:
        if seconds:
            self._queued += seconds
            self.wait(self._queued)

    def copy(self, lane: Lane, link: Link, nbytes: int) -> tuple[float, float]:
        """Starts a copy on a lane of ``link`` as soon as that is free; returns its start and end."""
        is_out = lane is Lane.OUT
        own_end, other_end = (self._out_end, self._in_end) if is_out else (self._in_end, self._out_end)
        seconds = (link.out_rate if is_out else link.in_rate).seconds(nbytes)
        start = end = own_end if own_end > self.clock else self.clock
        if other_end <= start:
            end += seconds
        else:
            # The other lane's remaining copies run without a pause: none is queued for later than now.
            share, overlap = max(0.0, 2 * link.both_factor - 1), other_end - start
            end += seconds / share if seconds < overlap * share else seconds + overlap * (1 - share)
        if is_out:
            self._out_end = end
        else:
            self._in_end = end
        self._compute_factor = link.compute_factor
        return start, end

    def run(self, seconds: float) -> None:
        """Runs an op that takes ``seconds`` when nothing is copied."""
        share, overlap = self._compute_factor, self._copy_seconds_left()
        self.clock += seconds / share if seconds < overlap * share else seconds + overlap * (1 - share)

    def wait(self, until: float) -> None:
        """Stalls compute until the time ``until``, if that is in the future."""
        self.clock = max(self.clock, until)

    def _copy_seconds_left(self) -> float:
        """Seconds for which queued copies will still run: lanes run without a pause."""
        end = self._out_end if self._out_end > self._in_end else self._in_end
        return end - self.clock if end > self.clock else 0.0
