"""What did the last step really do? Marks from the graphs and the engine's own records → a measured Timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lmswap.execute._C import TransferRecord
from lmswap.ir.timeline import Lane, Span, Timeline

SegmentKey = tuple[int, str]  # graph, phase


@dataclass
class StepRecord:
    """The raw record of one step, in seconds of CLOCK_MONOTONIC."""

    segments: list[tuple[SegmentKey, float, float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # tensor bytes on the device
    transfers: list[TransferRecord] = field(default_factory=list)

    @property
    def sequence(self) -> tuple[SegmentKey, ...]:
        """Which segments ran, in order."""
        return tuple(key for key, _, _ in self.segments)

    @property
    def is_complete(self) -> bool:
        """Whether every forward segment has seen its backward."""
        forwards = [graph for (graph, phase), _, _ in self.segments if phase == "forward"]
        backwards = [graph for (graph, phase), _, _ in self.segments if phase == "backward"]
        return bool(self.segments) and sorted(forwards) == sorted(backwards)

    @property
    def compute_seconds(self) -> float:
        """Time inside the model's graphs, stalls included; the loss and the optimizer are outside."""
        return sum(end - start for _, start, end in self.segments)

    @property
    def stall_seconds(self) -> float:
        """Time that compute lost waiting for copies."""
        return sum(record.wait_end_seconds - record.wait_start_seconds for record in self.transfers)

    def moved_bytes(self, *, is_in: bool) -> int:
        """Bytes copied in or out."""
        return sum(record.nbytes for record in self.transfers if record.is_in is is_in)

    def timeline(self) -> Timeline:
        """The step as spans that start at 0."""
        origin = min((start for _, start, _ in self.segments), default=0.0)
        spans = []
        stalls = sorted(
            (r.wait_start_seconds, r.wait_end_seconds)
            for r in self.transfers
            if r.wait_end_seconds > r.wait_start_seconds
        )
        for (graph, phase), start, end in self.segments:
            clock = start
            for stall_start, stall_end in stalls:
                if start <= stall_start < end:
                    spans.append(Span(Lane.COMPUTE, f"{phase} {graph}", clock - origin, stall_start - origin))
                    spans.append(Span(Lane.STALL, "wait", stall_start - origin, stall_end - origin))
                    clock = stall_end
            spans.append(Span(Lane.COMPUTE, f"{phase} {graph}", clock - origin, max(clock, end) - origin))
        for record in self.transfers:
            lane = Lane.IN if record.is_in else Lane.OUT
            start, end = record.start_seconds - origin, record.end_seconds - origin
            spans.append(Span(lane, f"swap {record.swap}", start, end, record.nbytes, record.swap))
        memory = tuple((seconds - origin, nbytes) for seconds, nbytes in self.memory)
        return Timeline("measured", tuple(spans), memory)


class Recorder:
    """Collects the record of the step under way and keeps the last complete one."""

    def __init__(self, tensor_bytes: Callable[[], int], take_transfers: Callable[[], list[TransferRecord]]) -> None:
        self._tensor_bytes, self._take_transfers = tensor_bytes, take_transfers
        self._current = StepRecord()
        self.last: StepRecord | None = None
        self.num_steps = 0

    @property
    def current_sequence(self) -> tuple[SegmentKey, ...]:
        """Segments that have run in the step under way."""
        return self._current.sequence

    def memory_changed(self) -> None:
        """Adds a point to the memory curve."""
        self._current.memory.append((time.perf_counter(), self._tensor_bytes()))

    @contextmanager
    def segment(self, key: SegmentKey) -> Iterator[None]:
        """Records one run of a segment; a forward that follows a backward begins a new step."""
        if key[1] != "backward" and (key[1] == "inference" or self._begins_step(key)):
            self.finish_step()
        self.memory_changed()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._current.segments.append((key, start, time.perf_counter()))
            self.memory_changed()
        if self._current.is_complete:
            self.finish_step()

    def finish_step(self) -> None:
        """Closes the record of the step under way, if anything ran in it."""
        transfers = self._take_transfers()
        if self._current.segments:
            self._current.transfers = transfers
            self.last = self._current
            self.num_steps += 1
        self._current = StepRecord()

    def _begins_step(self, key: SegmentKey) -> bool:
        keys = self._current.sequence
        return key in keys or any(phase != "forward" for _, phase in keys)
