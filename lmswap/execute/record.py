"""What did the last step really do? Marks from the graphs and the engine's own records → a measured Timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from lmswap.execute._C import TransferRecord
from lmswap.ir.timeline import Lane, Span, Timeline

SegmentKey = tuple[int, str]  # graph, phase
Time = TypeVar("Time", int, float)

# Forwards whose backward never comes, as in evaluation with gradients on, are without end; no step has so many runs.
_MOST_WAITING = 256


class Clock(Protocol):
    """Where marks come from: the engine, whose marks pass when the device passes them."""

    def mark(self) -> int:
        """Marks what the device has been given so far."""

    def take_mark(self, mark: int) -> float:
        """When the device passed it, in seconds of CLOCK_MONOTONIC; waits for that."""

    def take_records(self) -> list[TransferRecord]:
        """Copies that have ended since the last call."""


class TensorMemory(Protocol):
    """What tensors hold on the device; see `lmswap.hardware.memory.DeviceMemory`."""

    def used_tensor_bytes(self) -> int:
        """Now, as far as the host has come."""

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> Sequence[tuple[float, int]]:
        """Between two times of CLOCK_MONOTONIC, beside what was read now and then."""


class SegmentRun(NamedTuple, Generic[Time]):
    """One run of a segment: in marks, until they are read, or in seconds of CLOCK_MONOTONIC."""

    key: SegmentKey
    start: Time
    ops: tuple[Time, ...]  # where its second op began, and so on; empty in a step whose ops were not timed
    end: Time


@dataclass
class _MarkedStep:
    """A step whose times are marks still: reading them would make the host wait for the device."""

    begun_seconds: float  # host time
    runs: list[SegmentRun[int]] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)  # mark, tensor bytes on the device
    times_ops: bool = False

    @property
    def sequence(self) -> tuple[SegmentKey, ...]:
        return tuple(run.key for run in self.runs)

    def count(self, graph: int, phase: str) -> int:
        """How often that segment has run."""
        return self.sequence.count((graph, phase))

    @property
    def is_complete(self) -> bool:
        """Whether every forward segment has seen its backward."""
        forwards = sorted(graph for graph, phase in self.sequence if phase == "forward")
        backwards = sorted(graph for graph, phase in self.sequence if phase == "backward")
        return bool(self.runs) and forwards == backwards


@dataclass(frozen=True)
class StepRecord:
    """One step as it ran, in seconds of CLOCK_MONOTONIC."""

    segments: tuple[SegmentRun[float], ...]
    memory: tuple[tuple[float, int], ...]  # tensor bytes on the device
    transfers: tuple[TransferRecord, ...]

    @property
    def begun_seconds(self) -> float:
        """When its first mark was passed: second 0 of its timeline."""
        return min([run.start for run in self.segments] + [seconds for seconds, _ in self.memory])

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
            names: of the buffers, by the number under which they were moved.
            other_bytes: what counts against the budget beside tensors; added to the memory curve.
        """
        origin = self.begun_seconds
        waits = sorted((r.wait_start_seconds, r.wait_end_seconds, r.swap) for r in self.transfers)
        spans = []
        for (graph, phase), start, _, end in self.segments:
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
            spans.append(Span(lane, names[record.swap], start, end, record.nbytes, record.swap))
        memory = tuple((seconds - origin, nbytes + other_bytes) for seconds, nbytes in self.memory)
        return Timeline("measured", tuple(spans), memory)


class Recorder:
    """Collects marks of the step under way; they are read one step later, when the device has passed them."""

    def __init__(self, clock: Clock, memory: TensorMemory) -> None:
        self._clock, self._memory = clock, memory
        self._current = _MarkedStep(time.perf_counter())
        self._ops: list[int] = []  # marks of the segment under way
        self._waiting: list[_MarkedStep] = []  # forwards before it that no backward has claimed
        self._ended: _MarkedStep | None = None
        self._last: StepRecord | None = None
        self._transfers: list[TransferRecord] = []
        self.observers: list[Callable[[StepRecord], None]] = []  # called with each step's record when it is read
        self.num_steps = 0
        self.last_sequence: tuple[SegmentKey, ...] = ()  # segments of the last step that ended, in order

    @property
    def current_sequence(self) -> tuple[SegmentKey, ...]:
        """Segments that have run in the step under way."""
        return self._current.sequence

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
        if self._ended is not None:
            stop = [*self._waiting, self._current][0].begun_seconds
            self._last, self._ended = self._read(self._ended, stop), None
        return self._last

    def memory_changed(self) -> None:
        """Adds a point to the memory curve."""
        self._current.memory.append((self._clock.mark(), self._memory.used_tensor_bytes()))

    @contextmanager
    def segment(self, key: SegmentKey) -> Iterator[None]:
        """Records one run of a segment; a forward that follows a backward begins a new step."""
        start = self.begin_segment(key)
        try:
            yield
        finally:
            self.end_segment(key, start)

    def begin_segment(self, key: SegmentKey) -> int:
        """For those who cannot wrap the run in `segment`; what it returns is for `end_segment`."""
        if self._begins_step(key):
            self._end_step()
        elif key[1] == "backward":
            self._claim(key[0])
        elif key in self._current.sequence:
            self._wait()
        self.memory_changed()
        self._ops.clear()
        return self._clock.mark()

    def begin_op(self) -> None:
        """The next op of the segment begins; the first one began with it."""
        if self.times_ops:
            self._ops.append(self._clock.mark())

    def end_segment(self, key: SegmentKey, start: int) -> None:
        """The run that `begin_segment` began is over."""
        self._current.runs.append(SegmentRun(key, start, tuple(self._ops), self._clock.mark()))
        self.memory_changed()

    def end_if_complete(self) -> None:
        """Ends the step under way if all that ran forward has run backward."""
        if self._current.is_complete:
            self._end_step()

    def _begins_step(self, key: SegmentKey) -> bool:
        return key[1] != "backward" and any(phase == "backward" for _, phase in self._current.sequence)

    def _wait(self) -> None:
        """Sets aside what ran so far: a graph runs again, either in the same step or since no backward will come."""
        self._waiting.append(self._current)
        self._current = _MarkedStep(time.perf_counter())
        if len(self._waiting) > _MOST_WAITING:
            self._end(self._waiting.pop(0))

    def _claim(self, graph: int) -> None:
        """Takes what was set aside back into the step if a backward of ``graph`` shows that it belongs there."""
        while self._waiting and self._current.count(graph, "forward") <= self._current.count(graph, "backward"):
            earlier, current = self._waiting.pop(), self._current
            self._current = _MarkedStep(
                earlier.begun_seconds, earlier.runs + current.runs, earlier.memory + current.memory
            )

    def _end_step(self) -> None:
        for step in (*self._waiting, self._current):
            self._end(step)
        self._waiting.clear()
        self._current = _MarkedStep(time.perf_counter())

    def _end(self, step: _MarkedStep) -> None:
        if self._ended is not None:
            self._last = self._read(self._ended, step.begun_seconds)
        self._ended = step
        self.last_sequence = step.sequence
        self.num_steps += 1

    def _read(self, step: _MarkedStep, stop: float) -> StepRecord:
        take = self._clock.take_mark
        segments = tuple(
            SegmentRun(run.key, take(run.start), tuple(map(take, run.ops)), take(run.end)) for run in step.runs
        )
        memory = [(take(mark), nbytes) for mark, nbytes in step.memory]
        memory += self._memory.tensor_changes(memory[0][0], memory[-1][0])  # a segment marks where it begins and ends
        self._transfers += self._clock.take_records()
        own = [record for record in self._transfers if step.begun_seconds <= record.queued_seconds < stop]
        self._transfers = [record for record in self._transfers if record.queued_seconds >= stop]
        record = StepRecord(segments, tuple(sorted(memory)), tuple(own))
        for observer in self.observers:
            observer(record)
        return record
