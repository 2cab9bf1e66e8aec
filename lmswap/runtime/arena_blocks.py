"""Arithmetic of the caching allocator's blocks: which extents must be free for a tensor to get its planned offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmswap.ir.arena_layout import SMALL_BYTES

Extent = tuple[int, int]  # address, bytes
# Calls to the allocator at one opening, in order: (bytes, address) allocates, (0, address) frees.
Moves = tuple[tuple[int, int], ...]


class Occupied(Exception):
    """A planned extent is occupied."""


def within(addresses: range, pieces: Mapping[int, int]) -> dict[int, int]:
    """Return those of ``pieces``, bytes by address, that begin within ``addresses``."""
    return {address: nbytes for address, nbytes in pieces.items() if address in addresses}


def holding_moves(free: Sequence[Extent]) -> Moves:
    """Return the allocations that hold all of ``free`` above the small size, by size and then by address."""
    return tuple(sorted((nbytes, address) for address, nbytes in free if nbytes > SMALL_BYTES))


def extent_to_free(start: int, stop: int, closed: Mapping[int, int], loose: Mapping[int, int]) -> Extent:
    """Return the extent that must be freed for a place in [start, stop), from where to where.

    It covers the place, ``loose`` neighbours, which the allocator merges with it, and those ``closed`` neighbours
    without which a remainder too small to be held would be left.

    Raises:
        Occupied: a tensor occupies part of [start, stop).
    """
    free = {**closed, **loose}
    below = {address + nbytes: address for address, nbytes in free.items()}
    low = next((address for address, nbytes in free.items() if address <= start < address + nbytes), start)
    high = low
    while high < stop:
        if high not in free:
            raise Occupied(f"a tensor occupies {high}, where {stop - start} bytes are needed from {start} on")
        high += free[high]
    while low in below and (below[low] in loose or 0 < start - low <= SMALL_BYTES):
        low = below[low]
    while high in free and (high in loose or 0 < high - stop <= SMALL_BYTES):
        high += free[high]
    return low, high
