"""Records of a step: marked while it runs, ended for the host, and read as seconds and a measured Timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from lmswap.ir.timeline import STATE, Lane, Span, Timeline
from lmswap.runtime._C import TransferRecord

# Instead of a buffer's number, in records of copies that are part of no plan: of a storage that moves to or from its
# host copy for good, or of optimizer state.
MOVED, STREAMED = -1, -2

SegmentKey = tuple[int, str]  # graph, phase
Graphs = tuple[int, ...]  # key of a plan: the graphs of the step that it was made for
Curve = tuple[tuple[float, int], ...]  # fraction of a segment's run, bytes above those at its start
Time = TypeVar("Time", int, float)

# Where a device is behind the host by less than this share of a segment when that is fully queued, it waited for the
# host. By benchmarks/emulated/lag.py, run twice: at most 0.06 where busy for up to 71 % of the segment, 0.16 and more
# where for 86 % and more.
_MIN_LAG = 0.1


class Peaks(NamedTuple):
    """The highest bytes of a step, from the end of the previous one."""

    used_bytes: int = 0  # what counts against the budget
    tensor_bytes: int = 0
    tier_bytes: int = 0

    @property
    def other_bytes(self) -> int:
        """What counts against the budget besides tensors, less those of them that do not count."""
        return self.used_bytes - self.tensor_bytes

    def with_others(self, others: Peaks) -> Peaks:
        """Return the maximum of each field."""
        return Peaks(*map(max, self, others))


NO_PEAKS = Peaks()


class SegmentRun(NamedTuple, Generic[Time]):
    """One run of a segment; times are marks until they are read, then seconds of CLOCK_MONOTONIC."""

    key: SegmentKey
    start: Time
    ops: tuple[Time, ...]  # starts of its second and later ops; empty if ops were not timed
    end: Time
    follows: Graphs = ()  # the plan followed to its end; empty: none
    begun_seconds: float = 0.0  # host time when queueing began
    queued_seconds: float = 0.0  # host time when queueing ended
    holds: tuple[tuple[Time, Time], ...] = ()  # while the device waited for a batch of ops to be queued


@dataclass
class MarkedStep:
    """A step whose times are still marks: reading them makes the host wait for the device."""

    begun_seconds: float  # host time
    runs: list[SegmentRun[int]] = field(default_factory=list)
    sequence: tuple[SegmentKey, ...] = ()  # the segments that have run, in order
    marks: list[int] = field(default_factory=list)  # all of them, in the order of their creation
    memory: list[tuple[int, int]] = field(default_factory=list)  # mark, tensor bytes on the device
    curves: dict[int, Curve] = field(default_factory=dict)  # by a run's first mark: reused from an earlier step
    peaks: Peaks = NO_PEAKS
    times_ops: bool = False
    is_sampled: bool = False  # whether its memory was sampled
    trains: bool = False  # whether a backward ran in it
    _num_open: dict[int, int] = field(default_factory=dict)  # by graph: forwards less backwards

    def add(self, run: SegmentRun[int]) -> None:
        """Add a run of a segment: all of it, or nothing where a signal handler raises."""
        graph, phase = run.key
        num_open = self._num_open.get(graph, 0)
        # CPython runs handlers after calls, and below there are none.
        self.runs += (run,)
        self.sequence += (run.key,)
        if phase == "backward":
            self.trains = True
            self._num_open[graph] = num_open - 1
        elif phase == "forward":
            self._num_open[graph] = num_open + 1

    def needs_earlier_forward(self, graph: int) -> bool:
        """Return whether no forward of ``graph`` in it awaits its backward: another backward's forward came earlier."""
        return self._num_open.get(graph, 0) <= 0

    def with_earlier(self, earlier: MarkedStep) -> MarkedStep:
        """Return the step of what ran in ``earlier`` and then in this one."""
        both = MarkedStep(
            earlier.begun_seconds,
            marks=earlier.marks + self.marks,
            memory=earlier.memory + self.memory,
            curves=earlier.curves | self.curves,
            peaks=earlier.peaks.with_others(self.peaks),
            is_sampled=earlier.is_sampled or self.is_sampled,
        )
        for run in (*earlier.runs, *self.runs):
            both.add(run)
        return both

    @property
    def is_complete(self) -> bool:
        """Whether every forward segment has had its backward; with retain_graph=True some have several."""
        return bool(self.runs) and max(self._num_open.values(), default=0) <= 0

    def ended(self, number: int, peaks: Peaks, own_seconds: float = 0.0, lap_begins: int | None = None) -> EndedStep:
        """Return what is known without waiting for the device, if it ends now as step ``number``."""
        # A graph that trains nothing has a plan of its own, also in the middle of a step.
        plans = {run.follows for run in self.runs if run.key[1] != "inference"} or {run.follows for run in self.runs}
        follows = plans.pop() if len(plans) == 1 else ()
        return EndedStep(number, self.sequence, follows, peaks, own_seconds, lap_begins or number)


class EndedStep(NamedTuple):
    """A step that has ended for the host: its number from 1 on, its segments in order, and its peaks.

    ``own_seconds`` are the host's in lmswap's own code from the step's first call to that of the next, see `OwnTime`.
    ``follows`` is the plan that the whole step followed, which names its buffers; empty if there is none. The peaks are
    those since step ``lap_begins`` began, an earlier one where steps repeat, see `Recorder.expect_repeats`.
    """

    number: int
    sequence: tuple[SegmentKey, ...]
    follows: Graphs
    peaks: Peaks
    own_seconds: float = 0.0
    lap_begins: int = 0

    def repeated(self, number: int, own_seconds: float) -> EndedStep:
        """Return the record of a repetition, step ``number``."""
        return EndedStep(number, self.sequence, self.follows, self.peaks, own_seconds, self.lap_begins)

    @property
    def trains(self) -> bool:
        """Whether it included a backward."""
        return any(phase == "backward" for _, phase in self.sequence)


@dataclass(frozen=True)
class StepRecord:
    """A completed step, in seconds of CLOCK_MONOTONIC."""

    step: EndedStep
    segments: tuple[SegmentRun[float], ...]
    memory: tuple[tuple[float, int], ...]  # tensor bytes on the device
    transfers: tuple[TransferRecord, ...]

    @property
    def begun_seconds(self) -> float:
        """The time of its first mark: second 0 of its timeline."""
        return min([run.start for run in self.segments] + [seconds for seconds, _ in self.memory])

    @property
    def host_bound_seconds(self) -> float:
        """The seconds of segments that the device ran as soon as they were queued: it waits for the host there."""
        of_host = zip(self.segments, self.host_seconds(), strict=True)
        return sum(run.end - run.start for run, seconds in of_host if seconds is not None)

    def host_seconds(self) -> tuple[float | None, ...]:
        """Return, for each run, the host's seconds to queue it if the device had to wait for that, else None."""
        return tuple(
            run.queued_seconds - run.begun_seconds
            if not run.holds and run.end - run.queued_seconds < _MIN_LAG * (run.end - run.start)
            else None
            for run in self.segments
        )

    def op_seconds(self) -> tuple[tuple[float, ...], ...]:
        """Return, for each run, the seconds between the starts of its ops, without waits for copies and the host.

        One number for all ops where they were not timed.
        """
        waits = sorted([*((r.wait_start_seconds, r.wait_end_seconds) for r in self.transfers), *self._holds()])
        clock = [0.0, *(seconds for wait in waits for seconds in wait)]  # compute's waits do not overlap
        waited = np.cumsum([0.0, *(seconds for start, end in waits for seconds in (0.0, end - start))])
        found = []
        for run in self.segments:
            begins = np.array([run.start, *run.ops, run.end])
            # A GPU's clock is synchronized with the host's now and then: a later mark may have a smaller time.
            passed = np.maximum.accumulate(begins - np.interp(begins, clock, waited))
            found.append(tuple(np.diff(passed).tolist()))
        return tuple(found)

    def _holds(self) -> list[tuple[float, float]]:
        return [hold for run in self.segments for hold in run.holds]

    def timeline(self, names: Sequence[str]) -> Timeline:
        """Return the step as spans, starting at 0; the memory curve counts like the budget.

        Args:
            names: of the buffers, by the number under which they were moved, in the plan that the step followed; one
                outside that plan, moved for a step that has not ended yet, is named by its number.
        """
        origin = self.begun_seconds
        waits: list[tuple[float, float, Lane, int | None]] = [
            *((r.wait_start_seconds, r.wait_end_seconds, Lane.STALL, r.swap) for r in self.transfers),
            *((start, end, Lane.HOST, None) for start, end in self._holds()),
        ]
        waits.sort(key=lambda wait: wait[:2])
        spans = []
        for (graph, phase), start, _, end, *_ in self.segments:
            clock = start
            for wait_start, wait_end, lane, buffer in waits:
                if start <= wait_start <= wait_end <= end:  # both 0 where compute did not wait
                    spans.append(Span(Lane.COMPUTE, f"{phase} {graph}", clock - origin, wait_start - origin))
                    spans.append(Span(lane, "wait", wait_start - origin, wait_end - origin, buffer=buffer))
                    clock = wait_end
            spans.append(Span(Lane.COMPUTE, f"{phase} {graph}", clock - origin, end - origin))
        for record in self.transfers:
            lane = Lane.IN if record.is_in else Lane.OUT
            start, end = record.start_seconds - origin, record.end_seconds - origin
            if record.swap < 0:  # part of no plan
                spans += [Span(lane, STATE, start, end, record.nbytes)] * (record.swap == STREAMED)
                continue
            name = names[record.swap] if record.swap < len(names) else f"buffer {record.swap}"
            spans.append(Span(lane, name, start, end, record.nbytes, record.swap))
        other_bytes = self.step.peaks.other_bytes
        memory = tuple((seconds - origin, nbytes + other_bytes) for seconds, nbytes in self.memory)
        return Timeline("measured", tuple(spans), memory)
