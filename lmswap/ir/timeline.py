"""What ran when, on which lane, and how many bytes were resident: the simulator's output and a real run's record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """The queues that run beside each other. STALL is compute waiting for a copy."""

    COMPUTE = "compute"
    STALL = "stall"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran on a lane for [start_seconds, end_seconds), counted from the start of the step."""

    lane: Lane
    name: str
    start_seconds: float
    end_seconds: float
    nbytes: int = 0  # moved, on the copy lanes
    buffer: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """The spans of one step. ``memory`` is (seconds, resident bytes), each holding until the next point."""

    source: str  # "predicted" or "measured"
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]

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

    def lane_bytes(self, lane: Lane) -> int:
        """Bytes that a lane moved."""
        return sum(span.nbytes for span in self.spans if span.lane is lane)
