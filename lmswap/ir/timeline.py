"""Timelines: spans on lanes and the memory curve of a step, simulated or measured. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from lmswap.ir.program import BufferKind


class Lane(StrEnum):
    """Queues that run in parallel.

    STALL is compute waiting for a copy, HOST compute waiting for the host to queue the next op or copy, NETWORK
    all-reduces gradients.
    """

    COMPUTE = "compute"
    STALL = "stall"
    OUT = "out"
    IN = "in"
    HOST = "host"
    NETWORK = "network"


_OPTIONAL_LANES = (Lane.HOST, Lane.NETWORK)
STATE = "training state"  # the name of copies that updates need, and which are part of no plan


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran on a lane for [start_seconds, end_seconds), counted from the start of the (first) step."""

    lane: Lane
    name: str
    start_seconds: float
    end_seconds: float
    nbytes: int = 0  # moved, on the copy lanes
    buffer: int | None = None
    is_pageable: bool = False  # a copy whose host memory is not pinned: the driver stages it, far below the link's rate

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_seconds - self.start_seconds

    def shifted(self, seconds: float) -> Span:
        """This span, shifted by ``seconds``."""
        return replace(self, start_seconds=self.start_seconds + seconds, end_seconds=self.end_seconds + seconds)


@dataclass(frozen=True, slots=True)
class Step:
    """One of several steps: [start_seconds, end_seconds). ``number`` is the recorder's."""

    number: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of one step, or of several: then ``steps`` says which, and seconds count from the first one's start.

    ``memory`` is (seconds, resident bytes), each holding until the next point; empty where it was not measured.
    ``bytes_by_kind`` are parts of the bytes at each point, which add up to them; empty where kinds are not known.
    """

    source: str  # "predicted", "measured", or the profiler's name
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]
    steps: tuple[Step, ...] = ()
    bytes_by_kind: dict[BufferKind, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = f"{len(self.spans)} spans, {len(self.memory)} points of memory"
        return f"<{self.source} timeline of {self.seconds:.4g} s: {size}; see its fields>"

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All device lanes, and those of host and network that have spans."""
        seen = {span.lane for span in self.spans}
        return tuple(lane for lane in Lane if lane in seen or lane not in _OPTIONAL_LANES)

    @property
    def seconds(self) -> float:
        """End of the last span."""
        return max((span.end_seconds for span in self.spans), default=0.0)

    @property
    def peak_bytes(self) -> int:
        """The highest point of the memory curve."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    def lane_seconds(self, lane: Lane) -> float:
        """Sum of the spans on a lane."""
        return sum(span.seconds for span in self.spans if span.lane is lane)

    def busy_seconds(self, lane: Lane) -> float:
        """Seconds during which at least one span of a lane was active: a disk serves several copies at once."""
        busy, until = 0.0, 0.0
        for span in sorted((span for span in self.spans if span.lane is lane), key=lambda span: span.start_seconds):
            busy += max(0.0, span.end_seconds - max(span.start_seconds, until))
            until = max(until, span.end_seconds)
        return busy

    def lane_bytes(self, lane: Lane, *, is_state: bool = False) -> int:
        """Bytes that a lane moved by the plan, or for updates of the training state."""
        return sum(span.nbytes for span in self.spans if span.lane is lane and (span.name == STATE) is is_state)
