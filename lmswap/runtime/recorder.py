"""Recorder of steps: marks set by graphs and the engine's transfer records, read once the device has passed them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lmswap.runtime import _C
from lmswap.runtime.own_time import OwnTime
from lmswap.runtime.step_record import Curve, EndedStep, Graphs, MarkedStep, Peaks, SegmentKey, SegmentRun, StepRecord

# A step whose ops are timed is queued in batches of this many ops, each started when it is fully queued: with marks
# between ops the host is slower than many devices. A stream holds about a thousand items of queued work.
_OPS_HELD = 128
_MAX_HOLD_SECONDS = 1.0  # more than a host takes to queue the ops of one hold
# Limit of forwards without a backward, as in evaluation with gradients enabled; no step has so many runs.
_MAX_UNCLAIMED = 256
# The peak of all memory, a read of /proc, is read once for this many steps where they repeat the one before.
STEPS_PER_LAP = 8


class TensorMemory(Protocol):
    """The device memory held by tensors; see `lmswap.hardware.memory.DeviceMemory`."""

    def used_tensor_bytes(self) -> int:
        """Return the bytes now, as seen by the host."""

    def reports_changes(self) -> bool:
        """Whether `tensor_changes` reports all changes; else the memory must be sampled."""

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> Sequence[tuple[float, int]]:
        """Return (seconds, tensor bytes) at the changes between two times of CLOCK_MONOTONIC, besides the samples."""

    def lap_peaks(self, *, restart: bool = False) -> tuple[int, int]:
        """Return the peaks, of what counts against the budget and of tensors, since the last ``restart`` of them."""

    def lap_tensor_peak_bytes(self) -> int:
        """Return the peak of tensors alone, as `lap_peaks`."""


class Recorder:
    """Collects the marks of the step under way; they are read one step later, when the device has passed them."""

    def __init__(self, native: _C.Engine, memory: TensorMemory, stream: Callable[[], int]) -> None:
        """``native`` marks the current ``stream``; ``memory`` is sampled, or reports its changes."""
        self._native, self._memory, self._stream, self.own = native, memory, stream, OwnTime()
        self._current = MarkedStep(time.perf_counter())
        self._ops: list[int] = []  # marks of the segment under way
        self._holds: list[tuple[int, int]] = []  # marks before and after each hold of the device in it
        self._begun_seconds = 0.0  # host time when it began, shifted by the time of marks between its ops
        self._samples, self._samples_segment = not memory.reports_changes(), False  # in general, and in that segment
        self._begun_bytes = 0  # tensor bytes when it began
        self._curves: dict[SegmentKey, Curve] = {}  # of planned segments, which allocate alike in each step
        self._unclaimed: list[MarkedStep] = []  # earlier forwards that no backward has claimed
        self._unread: tuple[MarkedStep, EndedStep] | None = None
        self._last: StepRecord | None = None
        self._last_training: StepRecord | None = None
        self._transfers: list[_C.TransferRecord] = []
        self._unreported: deque[EndedStep] = deque(maxlen=_MAX_UNCLAIMED)
        self.observers: list[Callable[[StepRecord], None]] = []  # called with each step's record when it is read
        self.num_steps = self.num_backwards = 0
        self.ended: EndedStep | None = None  # the last step that ended
        self.trained: EndedStep | None = None  # the last of them with a backward
        self.highest: EndedStep | None = None  # the first of those with the highest peak
        self._expected: EndedStep | None = None  # what the step under way may repeat
        self._expected_to, self._max_tensor_bytes = 0, 0  # the last step that may, and the peak of tensors that it may
        self._lap_begins = 1  # the first step of the lap whose peaks are read next

    @property
    def current_sequence(self) -> tuple[SegmentKey, ...]:
        """The segments that have run in the step under way."""
        return self._current.sequence

    @property
    def times_ops(self) -> bool:
        """Whether the ops of the step under way are timed."""
        return self._current.times_ops

    def time_ops(self) -> None:
        """Time the ops of the next step."""
        self._current.times_ops = True

    def expect_repeats(self, max_tensor_bytes: int) -> None:
        """Let the next steps repeat the last one: their peaks are read together, after `STEPS_PER_LAP` at the latest.

        A step repeats it that runs the same segments, while tensors hold ``max_tensor_bytes`` at most. No effect if the
        last step was a repetition itself, whose peaks were not read.
        """
        if self._lap_begins <= self.num_steps:
            return
        self._expected, self._max_tensor_bytes = self.ended, max_tensor_bytes
        self._expected_to = self.num_steps + STEPS_PER_LAP - 1

    def expect_others(self) -> None:
        """Read the peaks of the next steps one by one."""
        self._expected = None

    @property
    def expects_repeat(self) -> bool:
        """Whether all steps since `expect_repeats` have repeated that one, and another one begins."""
        return self._expected is not None and not self._current.sequence

    @property
    def is_repeated(self) -> bool:
        """Whether the step under way is complete and a repetition, see `expect_repeats`."""
        expected = self._expected
        return (
            expected is not None
            and self._current.sequence == expected.sequence
            and self.num_steps < self._expected_to
            and not (self._unclaimed or self.observers)
            and self._memory.lap_tensor_peak_bytes() <= self._max_tensor_bytes
        )

    def last(self) -> StepRecord | None:
        """Return the last step that ended; waits for the device."""
        self._expected = None  # its peaks are read now
        self.end_if_complete()
        if self._unread is not None:
            stop = [*self._unclaimed, self._current][0].begun_seconds
            unread, self._unread = self._unread, None
            self._read(*unread, stop)
        return self._last

    def last_training(self) -> StepRecord | None:
        """Return the last step with a backward, or else the last step; waits for the device."""
        last = self.last()
        return self._last_training or last

    def take_ended(self) -> Sequence[EndedStep]:
        """Return the steps that have ended since the last call."""
        if not self._unreported:
            return ()
        ended = tuple(self._unreported)
        self._unreported.clear()
        return ended

    @property
    def is_complete(self) -> bool:
        """Whether every forward of the step under way has had its backward."""
        return self._current.is_complete

    def complete(self, above_bytes: int = -1) -> EndedStep | None:
        """Return the step under way with its peaks so far, if all forwards that may belong to it have run backward.

        None also if what counts against the budget has not exceeded ``above_bytes`` in it.
        """
        if self._unclaimed or not self.is_complete:
            return None
        peaks = self._current.peaks.with_others(self._lap_peaks())
        if peaks.used_bytes <= above_bytes:
            return None
        return self._current.ended(self.num_steps + 1, peaks, lap_begins=self._lap_begins)

    @property
    def pending_sequence(self) -> tuple[SegmentKey, ...]:
        """The segments since the last step that ended; until a backward shows it, these may be of several steps."""
        current = self._current.sequence
        return sum((step.sequence for step in self._unclaimed), ()) + current if self._unclaimed else current

    def pending(self) -> EndedStep:
        """Return these segments as one step."""
        peaks = self._lap_peaks()
        for step in (*self._unclaimed, self._current):
            peaks = peaks.with_others(step.peaks)
        return EndedStep(self.num_steps + 1, self.pending_sequence, (), peaks)

    def sample_memory(self) -> None:
        """Sample the memory, unless its changes are reported or known."""
        if self._samples_segment:
            begun = time.perf_counter()
            self._sample()
            self._exclude_since(begun)

    def forget_curves(self) -> None:
        """Sample the memory of segments again: they are about to follow other plans."""
        self.last()
        self._curves.clear()

    def note_tier_bytes(self, nbytes: int) -> None:
        """Note the bytes held in the tier; to be called when they have increased."""
        if nbytes > self._current.peaks.tier_bytes:
            self._current.peaks = self._current.peaks.with_others(Peaks(tier_bytes=nbytes))

    @contextmanager
    def segment(self, key: SegmentKey, follows: Callable[[], Graphs] = tuple) -> Iterator[None]:
        """Record one run of a segment; a forward that follows a backward begins a new step.

        Args:
            key: the graph's number and the phase.
            follows: returns, at the end, the graphs of the plan followed: the segment may have left that of its
                beginning.
        """
        start = self.begin_segment(key)
        try:
            yield
        finally:
            self.end_segment(key, start, follows())

    def begin_segment(self, key: SegmentKey) -> int:
        """Begin a run that cannot be wrapped in `segment`; pass the return value to `end_segment`."""
        if key[1] != "backward" and self._current.trains:
            self._end_step()
        elif key[1] == "backward":
            self.num_backwards += 1
            self._claim(key[0])
        elif key in self._current.sequence:
            self._set_aside()
        self._ops.clear()
        self._holds.clear()
        if self.times_ops and self._native.can_hold():
            self._hold(self._mark())
        self._begun_seconds = time.perf_counter()
        is_wanted = key not in self._curves or self.times_ops or bool(self.observers)
        self._samples_segment = self._samples and is_wanted
        start, self._begun_bytes = self._sample()
        return start

    def begin_op(self) -> None:
        """Note that the next op of the segment begins; the first begins with the segment."""
        if self.times_ops:
            begun = time.perf_counter()
            self._ops.append(self._mark())
            if self._holds and len(self._ops) % _OPS_HELD == 0:
                self._native.let_go()
                self._hold(self._ops[-1])
            self._exclude_since(begun)

    def _hold(self, before: int) -> None:
        self._native.hold(self._stream(), _MAX_HOLD_SECONDS)
        self._holds.append((before, self._mark()))

    def _exclude_since(self, begun: float) -> None:
        """Exclude the host's time since ``begun`` from the segment: in other steps it is not spent."""
        self._begun_seconds += time.perf_counter() - begun

    def end_segment(self, key: SegmentKey, start: int, follows: Graphs = ()) -> None:
        """End a run.

        Args:
            key: as given to `begin_segment`.
            start: what that returned. Without effect if the step has ended since: the run was interrupted.
            follows: the graphs of the plan that it followed to its end; empty if it followed none.
        """
        step = self._current
        if self._holds:
            self._native.let_go()
        if start not in step.marks:
            return  # of an earlier step: the run was interrupted, and its context closed only now
        end, _ = self._sample()
        if follows and key in self._curves and not self._samples_segment:
            curve = step.curves[start] = self._curves[key]
            highest_bytes = self._begun_bytes + max((more for _, more in curve), default=0)
            step.peaks = step.peaks.with_others(Peaks(tensor_bytes=highest_bytes))
        step.is_sampled |= self._samples_segment
        host = self._begun_seconds, time.perf_counter()
        step.add(SegmentRun(key, start, tuple(self._ops), end, follows, *host, tuple(self._holds)))
        self._samples_segment = False

    def end_if_complete(self) -> None:
        """End the step under way if it is complete."""
        if self.is_complete:
            self._end_step()

    def _mark(self) -> int:
        mark = self._native.mark(self._stream())
        self._current.marks.append(mark)
        return mark

    def _sample(self) -> tuple[int, int]:
        """Set a mark and sample the memory there; return both."""
        sample = self._native.mark(self._stream()), self._memory.used_tensor_bytes()
        self._current.marks.append(sample[0])
        self._current.memory.append(sample)
        return sample

    def _set_aside(self) -> None:
        """Set aside what ran so far: a graph is run twice, in the same step, or because no backward will follow."""
        self._end_lap()
        current, self._current = self._current, MarkedStep(time.perf_counter())
        self._unclaimed.append(current)
        if len(self._unclaimed) > _MAX_UNCLAIMED:
            self._end(self._unclaimed.pop(0))

    def _claim(self, graph: int) -> None:
        """Merge what was set aside into the step, as far as a backward of ``graph`` shows that it belongs there."""
        while self._unclaimed and self._current.needs_earlier_forward(graph):
            self._current = self._current.with_earlier(self._unclaimed.pop())

    def _end_step(self) -> None:
        if self._expected is not None and self.is_repeated:
            repeated, self._current = self._current, MarkedStep(time.perf_counter())
            self.num_steps += 1
            self.ended = self.trained = self._expected.repeated(self.num_steps, self.own.take())
            self._queue_read(repeated, self.ended)
            return
        self._end_lap()
        ended = [*self._unclaimed, self._current]
        self._unclaimed, self._current = [], MarkedStep(time.perf_counter())
        for step in ended:
            self._end(step)
        self._lap_begins = self.num_steps + 1

    def _end_lap(self) -> None:
        self._expected = None
        self._current.peaks = self._current.peaks.with_others(Peaks(*self._memory.lap_peaks(restart=True)))

    def _lap_peaks(self) -> Peaks:
        return Peaks(*self._memory.lap_peaks())

    def _end(self, step: MarkedStep) -> None:
        self.num_steps += 1
        ended = self.ended = step.ended(self.num_steps, step.peaks, self.own.take(), self._lap_begins)
        self._unreported.append(ended)
        if step.trains:
            self.trained = ended
        if self.highest is None or ended.peaks.used_bytes > self.highest.peaks.used_bytes:
            self.highest = ended
        self._queue_read(step, ended)

    def _queue_read(self, step: MarkedStep, ended: EndedStep) -> None:
        unread, self._unread = self._unread, (step, ended)
        if unread is not None:
            self._retire(*unread, step)

    def _retire(self, step: MarkedStep, ended: EndedStep, following: MarkedStep) -> None:
        """Read a step that can no longer be requested, if it is needed; else discard its marks."""
        is_last_training = step.trains and not following.trains
        if self.observers or step.is_sampled or step.times_ops or is_last_training:
            self._read(step, ended, following.begun_seconds)
            return
        *others, last = step.marks
        self._native.take_mark(last)  # waits, as reading does, so that the host stays less than two steps ahead
        self._native.forget_marks(others)
        self._native.forget_records(following.begun_seconds)

    def _read(self, step: MarkedStep, ended: EndedStep, stop: float) -> None:
        seconds = {mark: self._native.take_mark(mark) for mark in step.marks}
        segments = tuple(
            SegmentRun(
                run.key,
                seconds[run.start],
                tuple(seconds[op] for op in run.ops),
                seconds[run.end],
                run.follows,
                run.begun_seconds,
                run.queued_seconds,
                tuple((seconds[before], seconds[after]) for before, after in run.holds),
            )
            for run in step.runs
        )
        memory = [(seconds[mark], nbytes) for mark, nbytes in step.memory]
        memory += self._memory.tensor_changes(memory[0][0], memory[-1][0])  # segments sample at both ends
        for run in step.runs:
            memory += self._known_memory(step, run, seconds)
        self._transfers += self._native.take_records()
        own = [record for record in self._transfers if step.begun_seconds <= record.queued_seconds < stop]
        self._transfers = [record for record in self._transfers if record.queued_seconds >= stop]
        record = self._last = StepRecord(ended, segments, tuple(sorted(memory)), tuple(own))
        if record.step.trains:
            self._last_training = record
        for observer in self.observers:
            observer(record)

    def _known_memory(
        self, step: MarkedStep, run: SegmentRun[int], seconds: dict[int, float]
    ) -> Iterator[tuple[float, int]]:
        """Yield the tensor bytes within a run that was not sampled, from one that was; store those of one that was."""
        begun_bytes = dict(step.memory)[run.start]
        start, length = seconds[run.start], seconds[run.end] - seconds[run.start]
        if run.start in step.curves:
            yield from ((start + part * length, begun_bytes + more) for part, more in step.curves[run.start])
        elif step.is_sampled and run.follows:
            seen = [(seconds[mark], nbytes) for mark, nbytes in step.memory if run.start < mark < run.end]
            self._curves[run.key] = tuple(
                ((when - start) / length if length else 0.0, nbytes - begun_bytes) for when, nbytes in seen
            )
