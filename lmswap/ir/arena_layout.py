"""The layout of a step's arena on the device: which slots must be free before which allocations."""

from __future__ import annotations

from dataclasses import dataclass

# The allocator serves tensors of up to 1 MiB from other segments, and does not split a free block if the remainder
# would be no larger: the tensor gets all of it. So two slots touch, or the gap between them can be closed.
SMALL_BYTES = 2**20
BLOCK_BYTES = 512  # the allocator's unit
SEPARATION_BYTES = SMALL_BYTES + BLOCK_BYTES


def slot_bytes(nbytes: int) -> int:
    """The size of a tensor's slot: ``nbytes`` rounded up to the allocator's unit."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes [offset, offset + nbytes) of the arena; with None as many outside it.

    Results are allocated outside: the caller may hold them for any time, and an arena that is empty between steps can
    be replaced by another.
    """

    offset: int | None
    nbytes: int


@dataclass(frozen=True)
class Opening:
    """Slots that must be free when the step's next allocations are made."""

    position: int  # in the schedule: just before that op
    is_prefetch: bool  # allocated for a prefetch, not by the op
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class ArenaLayout:
    """``openings`` in order of time, one for each copy in and each op that allocates."""

    openings: tuple[Opening, ...]
    arena_bytes: int
    results_bytes: int  # what the allocator reserves outside the arena, the previous step's results included
    small_bytes: int  # what it reserves for tensors that are too small for a slot
    weight_bytes: int = 0  # of weights that stay resident beside it

    @property
    def total_bytes(self) -> int:
        """What the step reserves on the device."""
        return self.arena_bytes + self.results_bytes + self.small_bytes + self.weight_bytes
