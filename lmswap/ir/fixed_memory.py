"""Memory that a budget counts beside the tensors of a step, as `lmswap.enable` counted it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from lmswap.errors import CaptureError

MOST_BYTES = 2**46  # more than any machine has; sums over any program stay exact in 64 bits


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """What was in use before the step, what was reserved for later, and the margins that stay free."""

    before_bytes: int = 0
    reserve_bytes: int = 0
    margin_bytes: int = 0
    unmoved_margin_bytes: int = 0  # the margin of a step that neither swaps nor recomputes

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= MOST_BYTES:
                raise CaptureError(f"{field.name} cannot be {getattr(self, field.name)}")

    def total_bytes(self, *, is_unmoved: bool = False) -> int:
        """All of it, for a step that swaps or recomputes, or for one that does neither."""
        return sum(nbytes for _, nbytes in self.parts(is_unmoved=is_unmoved))

    def parts(self, *, is_unmoved: bool = False) -> Iterator[tuple[str, int]]:
        """Its parts by the names that reports give them."""
        yield "before the step", self.before_bytes
        yield "reserve", self.reserve_bytes
        yield "margin", self.unmoved_margin_bytes if is_unmoved else self.margin_bytes
