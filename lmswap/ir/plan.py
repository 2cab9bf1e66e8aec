"""What is decided for each buffer, and when: the planner's output, the rewriter's input."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Decision(StrEnum):
    """The fate of a buffer in a gap between two uses."""

    KEEP = "keep"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Swap:
    """One trip of a buffer to a tier and back, in the gap between two of its uses.

    All four times are positions (just before that op)::

        last use before        next use
           |                      |
        op op op op op op op op op op        compute
             ^out_start  ^release ^first_use
             [== copy out ==]  [== in ==]
                                ^in_start
        memory held #########.......#########

    ``out_start`` the copy out is queued (None: an earlier swap of this buffer left a copy that is still good);
    ``release`` compute waits for that copy, the device memory is free from here on (it may equal ``out_start``);
    ``in_start`` device memory is taken and the copy in is queued; ``first_use`` compute waits for it.
    The tier's bytes [offset, offset + nbytes) are held from the first out_start to the last first_use.
    At one position, all out_starts come first, then the releases, the in_starts, and the first_uses.
    """

    buffer: int
    tier: str
    offset: int
    out_start: int | None
    release: int
    in_start: int
    first_use: int


@dataclass(frozen=True)
class Plan:
    """Swaps in order of need (``first_use``), and what the simulator says they will cost.

    Copies at different positions are queued by position, copies at the same one in the order of ``swaps``.

    ``budget_bytes`` and ``predicted_peak_bytes`` count what the step itself allocates: see `lmswap.analyze.memory`.
    """

    policy: str
    budget_bytes: int
    swaps: tuple[Swap, ...]
    predicted_seconds: float
    predicted_peak_bytes: int
    tier_bytes: dict[str, int] = field(default_factory=dict)  # capacity each tier must offer
    reasons: dict[int, str] = field(default_factory=dict)  # buffer id -> why, for people

    def decision(self, buffer: int) -> Decision:
        """What happens to ``buffer``."""
        return Decision.SWAP if any(swap.buffer == buffer for swap in self.swaps) else Decision.KEEP
