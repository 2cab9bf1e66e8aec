"""What did the last step really do? Marks from the graphs and the engine's own records → a measured Timeline."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from lmswap.execute._C import TransferRecord
from lmswap.ir.timeline import Lane, Span, Timeline

SegmentKey = tuple[int, str]  # graph, phase
Graphs = tuple[int, ...]  # by which a plan is known: those of the step that it was made for
Curve = tuple[tuple[float, int], ...]  # parts of a segment's run that were over, and bytes more than when it began
Time = TypeVar("Time", int, float)

# Forwards whose backward never comes, as in evaluation with gradients on, are without end; no step has so many runs.
_MOST_WAITING = 256
# A device that is behind the host by less than this share of a segment, when that is queued, had to wait for the host.
# By benchmarks/emulated/lag.py, run twice: at most 0.06 where it was busy for up to 71 % of the segment, 0.16 and more
# where for 86 % and more.
_LEAST_LAG = 0.1


class Clock(Protocol):
    """Where marks come from: the engine, whose marks pass when the device passes them."""

    def mark(self) -> int:
        """Marks what the device has been given so far."""

    def take_mark(self, mark: int) -> float:
        """When the device passed it, in seconds of CLOCK_MONOTONIC; waits for that."""

    def take_records(self) -> list[TransferRecord]:
        """Copies that have ended since the last call."""

    def forget_marks(self, marks: list[int]) -> None:
        """Of which nobody wants to know when they were passed."""

    def forget_records(self, stop_seconds: float) -> None:
        """Of copies that were queued before a time of CLOCK_MONOTONIC."""


class TensorMemory(Protocol):
    """What tensors hold on the device; see `lmswap.hardware.memory.DeviceMemory`."""

    def used_tensor_bytes(self) -> int:
        """Now, as far as the host has come."""

    def tells_changes(self) -> bool:
        """Whether `tensor_changes` tells of all of them; else one has to look."""

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> Sequence[tuple[float, int]]:
        """Between two times of CLOCK_MONOTONIC, beside what was read now and then."""

    def start_lap(self) -> None:
        """Starts the peaks of a lap."""

    def lap_peaks(self) -> tuple[int, int]:
        """The most since then that counts against the budget, and of tensors."""


class Peaks(NamedTuple):
    """The most that a step held, of all it took: from where the one before it ended."""

    used_bytes: int = 0  # what counts against the budget
    tensor_bytes: int = 0
    tier_bytes: int = 0

    def with_others(self, others: Peaks) -> Peaks:
        """The peaks of both together."""
        return Peaks(*map(max, self, others))


NO_PEAKS = Peaks()


class SegmentRun(NamedTuple, Generic[Time]):
    """One run of a segment: in marks, until they are read, or in seconds of CLOCK_MONOTONIC."""

    key: SegmentKey
    start: Time
    ops: tuple[Time, ...]  # where its second op began, and so on; empty in a step whose ops were not timed
    end: Time
    follows: Graphs = ()  # the plan that it followed to its end; empty: none
    begun_seconds: float = 0.0  # host time when it began to be queued
    queued_seconds: float = 0.0  # host time when all of it was with the device


@dataclass
class _MarkedStep:
    """A step whose times are marks still: reading them would make the host wait for the device."""

    begun_seconds: float  # host time
    runs: list[SegmentRun[int]] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)  # mark, tensor bytes on the device
    curves: dict[int, Curve] = field(default_factory=dict)  # by a run's first mark: known, so that nobody looked
    peaks: Peaks = NO_PEAKS
    number: int = 0  # from 1 on, when it has ended
    times_ops: bool = False
    is_watched: bool = False  # whether somebody looked at its memory

    @property
    def sequence(self) -> tuple[SegmentKey, ...]:
        return tuple(run.key for run in self.runs)

    def count(self, graph: int, phase: str) -> int:
        """How often that segment has run."""
        return self.sequence.count((graph, phase))

    @property
    def marks(self) -> list[int]:
        """All of them, in the order in which they were made."""
        runs = {mark for run in self.runs for mark in (run.start, *run.ops, run.end)}
        return sorted(runs | {mark for mark, _ in self.memory})

    @property
    def is_complete(self) -> bool:
        """Whether every forward segment has seen its backward; some see several, with retain_graph=True."""
        forwards = Counter(graph for graph, phase in self.sequence if phase == "forward")
        backwards = Counter(graph for graph, phase in self.sequence if phase == "backward")
        return bool(self.runs) and forwards <= backwards

    @property
    def ended(self) -> EndedStep:
        """What is known of it without waiting for the device."""
        # A graph that trains nothing has a plan of its own, also in the middle of a step.
        plans = {run.follows for run in self.runs if run.key[1] != "inference"} or {run.follows for run in self.runs}
        follows = plans.pop() if len(plans) == 1 else ()
        return EndedStep(self.number, self.sequence, follows, self.peaks)


@dataclass(frozen=True)
class EndedStep:
    """A step that is over for the host: its number from 1 on, segments in order, and peaks.

    ``follows`` is the plan that it followed as a whole, and that gives its buffers their names; empty if there is none.
    """

    number: int
    sequence: tuple[SegmentKey, ...]
    follows: Graphs
    peaks: Peaks

    @property
    def trains(self) -> bool:
        """Whether a backward ran in it."""
        return any(phase == "backward" for _, phase in self.sequence)


@dataclass(frozen=True)
class StepRecord:
    """One step as it ran, in seconds of CLOCK_MONOTONIC."""

    step: EndedStep
    segments: tuple[SegmentRun[float], ...]
    memory: tuple[tuple[float, int], ...]  # tensor bytes on the device
    transfers: tuple[TransferRecord, ...]

    @property
    def begun_seconds(self) -> float:
        """When its first mark was passed: second 0 of its timeline."""
        return min([run.start for run in self.segments] + [seconds for seconds, _ in self.memory])

    @property
    def host_bound_seconds(self) -> float:
        """Of the segments that the device had run as soon as the host had queued them: it waits for the host there."""
        of_host = zip(self.segments, self.host_seconds(), strict=True)
        return sum(run.end - run.start for run, seconds in of_host if seconds is not None)

    def host_seconds(self) -> tuple[float | None, ...]:
        """By run of a segment: what the host took to queue it, if the device had to wait for that."""
        return tuple(
            run.queued_seconds - run.begun_seconds
            if run.end - run.queued_seconds < _LEAST_LAG * (run.end - run.start)
            else None
            for run in self.segments
        )

    def op_seconds(self) -> tuple[tuple[float, ...], ...]:
        """By run of a segment: seconds from where each op began to where the next did, less waits for copies.

        One number for all of its ops where they were not timed.
        """
        waits = sorted((r.wait_start_seconds, r.wait_end_seconds) for r in self.transfers)
        clock = [0.0, *(seconds for wait in waits for seconds in wait)]  # compute waits for one copy after the other
        waited = np.cumsum([0.0, *(seconds for start, end in waits for seconds in (0.0, end - start))])
        found = []
        for run in self.segments:
            begins = np.array([run.start, *run.ops, run.end])
            found.append(tuple(np.diff(begins - np.interp(begins, clock, waited)).tolist()))
        return tuple(found)

    def timeline(self, names: Sequence[str], *, other_bytes: int) -> Timeline:
        """The step as spans from 0 on.

        Args:
            names: of the buffers, by the number under which they were moved, in the plan that the step followed; one
                that the plan does not know, moved for another step that is not over yet, is called by its number.
            other_bytes: what counts against the budget beside tensors; added to the memory curve.
        """
        origin = self.begun_seconds
        waits = sorted((r.wait_start_seconds, r.wait_end_seconds, r.swap) for r in self.transfers)
        spans = []
        for (graph, phase), start, _, end, *_ in self.segments:
            clock = start
            for wait_start, wait_end, buffer in waits:
                if start <= wait_start <= wait_end <= end:  # both 0 where nothing waited
                    spans.append(Span(Lane.COMPUTE, f"{phase} {graph}", clock - origin, wait_start - origin))
                    stall = Span(Lane.STALL, "wait", wait_start - origin, wait_end - origin, buffer=buffer)
                    spans.append(stall)
                    clock = wait_end
            spans.append(Span(Lane.COMPUTE, f"{phase} {graph}", clock - origin, end - origin))
        for record in self.transfers:
            lane = Lane.IN if record.is_in else Lane.OUT
            start, end = record.start_seconds - origin, record.end_seconds - origin
            name = names[record.swap] if record.swap < len(names) else f"buffer {record.swap}"
            spans.append(Span(lane, name, start, end, record.nbytes, record.swap))
        memory = tuple((seconds - origin, nbytes + other_bytes) for seconds, nbytes in self.memory)
        return Timeline("measured", tuple(spans), memory)


class Recorder:
    """Collects marks of the step under way; they are read one step later, when the device has passed them."""

    def __init__(self, clock: Clock, memory: TensorMemory) -> None:
        self._clock, self._memory = clock, memory
        self._current = _MarkedStep(time.perf_counter())
        self._ops: list[int] = []  # marks of the segment under way
        self._begun_seconds = 0.0  # host time when it began
        self._watches = False  # whether somebody looks at its memory
        self._begun_bytes = 0  # what tensors held when it began
        self._curves: dict[SegmentKey, Curve] = {}  # of planned segments: they allocate alike in each step
        self._waiting: list[_MarkedStep] = []  # forwards before it that no backward has claimed
        self._unread: _MarkedStep | None = None
        self._last: StepRecord | None = None
        self._last_training: StepRecord | None = None
        self._transfers: list[TransferRecord] = []
        self._untold: deque[EndedStep] = deque(maxlen=_MOST_WAITING)
        self.observers: list[Callable[[StepRecord], None]] = []  # called with each step's record when it is read
        self.num_steps = 0
        self.ended: EndedStep | None = None  # the last step that ended
        self.trained: EndedStep | None = None  # the last of them with a backward
        self.highest: EndedStep | None = None  # the first of them that held the most

    @property
    def current_sequence(self) -> tuple[SegmentKey, ...]:
        """Segments that have run in the step under way."""
        return self._current.sequence

    @property
    def last_sequence(self) -> tuple[SegmentKey, ...]:
        """Segments of the last step that ended."""
        return self.ended.sequence if self.ended is not None else ()

    @property
    def times_ops(self) -> bool:
        """Whether the ops of the step under way are timed."""
        return self._current.times_ops

    def time_ops(self) -> None:
        """Asks for the ops of the step that is about to begin to be timed."""
        self._current.times_ops = True

    def last(self) -> StepRecord | None:
        """The last step that ended; waits for the device."""
        self.end_if_complete()
        if self._unread is not None:
            stop = [*self._waiting, self._current][0].begun_seconds
            unread, self._unread = self._unread, None
            self._read(unread, stop)
        return self._last

    def last_training(self) -> StepRecord | None:
        """The last step that had a backward, or that ended if none had; waits for the device."""
        last = self.last()
        return self._last_training or last

    def take_ended(self) -> list[EndedStep]:
        """The steps that have ended since the last call."""
        ended = list(self._untold)
        self._untold.clear()
        return ended

    def complete(self) -> EndedStep | None:
        """The step under way with its peaks so far, if all has run backward and no earlier forward may belong to it."""
        if self._waiting or not self._current.is_complete:
            return None
        peaks = self._current.peaks.with_others(self._lap_peaks())
        return replace(self._current.ended, number=self.num_steps + 1, peaks=peaks)

    def memory_changed(self) -> None:
        """Adds a point to the memory curve, where it is neither told nor known."""
        if self._watches:
            self._look(self._clock.mark())

    def forget_curves(self) -> None:
        """Looks again at what segments hold: they are about to follow other plans."""
        self.last()
        self._curves.clear()

    def tier_holds(self, nbytes: int) -> None:
        """So many bytes are in the tier now; to be told when they have become more."""
        self._current.peaks = self._current.peaks.with_others(Peaks(tier_bytes=nbytes))

    @contextmanager
    def segment(self, key: SegmentKey, follows: Callable[[], Graphs] = tuple) -> Iterator[None]:
        """Records one run of a segment; a forward that follows a backward begins a new step.

        ``follows`` is asked at the end which plan it followed: it may have left that of its beginning.
        """
        start = self.begin_segment(key)
        try:
            yield
        finally:
            self.end_segment(key, start, follows())

    def begin_segment(self, key: SegmentKey) -> int:
        """For those who cannot wrap the run in `segment`; what it returns is for `end_segment`."""
        if self._begins_step(key):
            self._end_step()
        elif key[1] == "backward":
            self._claim(key[0])
        elif key in self._current.sequence:
            self._wait()
        self._ops.clear()
        self._begun_seconds = time.perf_counter()
        is_wanted = self.times_ops or bool(self.observers) or key not in self._curves
        self._watches = is_wanted and not self._memory.tells_changes()
        start = self._clock.mark()
        self._begun_bytes = self._look(start)
        return start

    def begin_op(self) -> None:
        """The next op of the segment begins; the first one began with it."""
        if self.times_ops:
            self._ops.append(self._clock.mark())

    def end_segment(self, key: SegmentKey, start: int, follows: Graphs = ()) -> None:
        """The run that `begin_segment` began is over; it followed the plan of ``follows`` to its end."""
        step, end = self._current, self._clock.mark()
        if follows and key in self._curves and not self._watches:
            curve = step.curves[start] = self._curves[key]
            highest_bytes = self._begun_bytes + max((more for _, more in curve), default=0)
            step.peaks = step.peaks.with_others(Peaks(tensor_bytes=highest_bytes))
        step.is_watched |= self._watches
        host = self._begun_seconds, time.perf_counter()
        step.runs.append(SegmentRun(key, start, tuple(self._ops), end, follows, *host))
        self._watches = False
        self._look(end)

    def end_if_complete(self) -> None:
        """Ends the step under way if all that ran forward has run backward."""
        if self._current.is_complete:
            self._end_step()

    def _look(self, mark: int) -> int:
        nbytes = self._memory.used_tensor_bytes()
        self._current.memory.append((mark, nbytes))
        return nbytes

    def _begins_step(self, key: SegmentKey) -> bool:
        return key[1] != "backward" and any(phase == "backward" for _, phase in self._current.sequence)

    def _wait(self) -> None:
        """Sets aside what ran so far: a graph runs again, either in the same step or since no backward will come."""
        self._end_lap()
        self._waiting.append(self._current)
        self._current = _MarkedStep(time.perf_counter())
        if len(self._waiting) > _MOST_WAITING:
            self._end(self._waiting.pop(0))

    def _claim(self, graph: int) -> None:
        """Takes what was set aside back into the step if a backward of ``graph`` shows that it belongs there."""
        while self._waiting and self._current.count(graph, "forward") <= self._current.count(graph, "backward"):
            earlier, current = self._waiting.pop(), self._current
            self._current = _MarkedStep(
                earlier.begun_seconds,
                earlier.runs + current.runs,
                earlier.memory + current.memory,
                earlier.curves | current.curves,
                earlier.peaks.with_others(current.peaks),
                is_watched=earlier.is_watched or current.is_watched,
            )

    def _end_step(self) -> None:
        self._end_lap()
        for step in (*self._waiting, self._current):
            self._end(step)
        self._waiting.clear()
        self._current = _MarkedStep(time.perf_counter())

    def _end_lap(self) -> None:
        self._current.peaks = self._current.peaks.with_others(self._lap_peaks())
        self._memory.start_lap()

    def _lap_peaks(self) -> Peaks:
        return Peaks(*self._memory.lap_peaks())

    def _end(self, step: _MarkedStep) -> None:
        if self._unread is not None:
            self._leave(self._unread, step)
        self._unread = step
        self.num_steps += 1
        step.number = self.num_steps
        self.ended = step.ended
        self._untold.append(self.ended)
        if self.ended.trains:
            self.trained = self.ended
        if self.highest is None or self.ended.peaks.used_bytes > self.highest.peaks.used_bytes:
            self.highest = self.ended

    def _leave(self, step: _MarkedStep, following: _MarkedStep) -> None:
        """Reads a step that nobody can ask for any more, if somebody wants to know of it; else forgets it."""
        is_last_training = step.ended.trains and not following.ended.trains
        if self.observers or step.is_watched or step.times_ops or is_last_training:
            self._read(step, following.begun_seconds)
            return
        *others, last = step.marks
        self._clock.take_mark(last)  # waits, as for a step that is read: the host stays less than two steps ahead
        self._clock.forget_marks(others)
        self._clock.forget_records(following.begun_seconds)

    def _read(self, step: _MarkedStep, stop: float) -> None:
        seconds = {mark: self._clock.take_mark(mark) for mark in step.marks}
        segments = tuple(
            SegmentRun(
                run.key,
                seconds[run.start],
                tuple(seconds[op] for op in run.ops),
                seconds[run.end],
                run.follows,
                run.begun_seconds,
                run.queued_seconds,
            )
            for run in step.runs
        )
        memory = [(seconds[mark], nbytes) for mark, nbytes in step.memory]
        memory += self._memory.tensor_changes(memory[0][0], memory[-1][0])  # a segment looks where it begins and ends
        for run in step.runs:
            memory += self._known_memory(step, run, seconds)
        self._transfers += self._clock.take_records()
        own = [record for record in self._transfers if step.begun_seconds <= record.queued_seconds < stop]
        self._transfers = [record for record in self._transfers if record.queued_seconds >= stop]
        record = self._last = StepRecord(step.ended, segments, tuple(sorted(memory)), tuple(own))
        if record.step.trains:
            self._last_training = record
        for observer in self.observers:
            observer(record)

    def _known_memory(
        self, step: _MarkedStep, run: SegmentRun[int], seconds: dict[int, float]
    ) -> Iterator[tuple[float, int]]:
        """What tensors held within a run that nobody watched, as in one that was; keeps it of one that was."""
        begun_bytes = dict(step.memory)[run.start]
        start, length = seconds[run.start], seconds[run.end] - seconds[run.start]
        if run.start in step.curves:
            yield from ((start + part * length, begun_bytes + more) for part, more in step.curves[run.start])
        elif step.is_watched and run.follows:
            seen = [(seconds[mark], nbytes) for mark, nbytes in step.memory if run.start < mark < run.end]
            self._curves[run.key] = tuple(
                ((when - start) / length if length else 0.0, nbytes - begun_bytes) for when, nbytes in seen
            )
