"""Where on the device do the tensors of a step lie, and when must which places be free? The arena's script."""

from __future__ import annotations

from dataclasses import dataclass

# The allocator serves tensors of up to 1 MiB elsewhere, and does not split a free block where no more than that
# remains: whoever takes the block has the rest too. So a hole between two places is none or large enough to be closed.
SMALL_BYTES = 2**20
BLOCK_BYTES = 512  # the allocator's unit
APART_BYTES = SMALL_BYTES + BLOCK_BYTES


def slot_bytes(nbytes: int) -> int:
    """The size of the place that a tensor gets: what the allocator takes for it."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes [offset, offset + nbytes) of the arena; with None as many anywhere beside it.

    That is where results lie: the caller holds them for as long as it likes, and an arena in which nothing lies between
    steps can be made anew.
    """

    offset: int | None
    nbytes: int


@dataclass(frozen=True)
class Opening:
    """ArenaLayout that are to be free when the step's next allocations are made."""

    position: int  # in the schedule: just before that op
    is_copy_in: bool  # made for a copy in, not by the op
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class ArenaLayout:
    """``openings`` in order of time, one for each copy in and each op that allocates."""

    openings: tuple[Opening, ...]
    arena_bytes: int
    results_bytes: int  # what the allocator takes for places beside the arena, those of the step before included
    small_bytes: int  # what it takes for tensors that are too small for a place

    @property
    def total_bytes(self) -> int:
        """What the step takes on the device."""
        return self.arena_bytes + self.results_bytes + self.small_bytes
