"""What has to be free for the allocator to put a tensor where it should lie? Arithmetic of its blocks, by address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmswap.ir.arena_layout import SMALL_BYTES

Extent = tuple[int, int]  # address, bytes
# What the allocator does at one opening: (bytes, address) takes, (0, address) gives back.
Moves = tuple[tuple[int, int], ...]


class Taken(Exception):
    """A place is not free."""


def within(addresses: range, pieces: Mapping[int, int]) -> dict[int, int]:
    """Those of ``pieces``, bytes by address, that lie there."""
    return {address: nbytes for address, nbytes in pieces.items() if address in addresses}


def takes(free: Sequence[Extent]) -> Moves:
    """What takes of ``free`` all that can be held: what is large enough, the smallest, and the lowest of equal ones."""
    return tuple(sorted((nbytes, address) for address, nbytes in free if nbytes > SMALL_BYTES))


def run_around(start: int, stop: int, closed: Mapping[int, int], loose: Mapping[int, int]) -> Extent:
    """Where the free memory begins and ends, all of it that has to be let go of for a place in [start, stop).

    That is what lies under it, what is ``loose`` beside that, which the allocator adds to it, and as much of what is
    ``closed`` beside it that a rest is none or can be held.
    """
    free = {**closed, **loose}
    below = {address + nbytes: address for address, nbytes in free.items()}
    low = next((address for address, nbytes in free.items() if address <= start < address + nbytes), start)
    high = low
    while high < stop:
        if high not in free:
            raise Taken(f"a tensor lies at {high}, where {stop - start} bytes are needed from {start} on")
        high += free[high]
    while low in below and (below[low] in loose or 0 < start - low <= SMALL_BYTES):
        low = below[low]
    while high in free and (high in loose or 0 < high - stop <= SMALL_BYTES):
        high += free[high]
    return low, high
