"""Where in a tier does each swapped buffer lie? Lifetimes and sizes → page-exact offsets and the capacity to reserve.

Offsets are packed by first fit in a few orders, and the packing that needs least is taken. The
problem (dynamic storage allocation) is NP-hard; the bytes live at once are a lower bound. O(blocks²).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmswap.ir.plan import Swap
from lmswap.ir.program import Program

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """A tier's bytes for one buffer, held over the positions [start, stop)."""

    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class Packing:
    """An offset for each block, all multiples of a page, and the bytes from 0 to the end of the highest block."""

    offsets: tuple[int, ...]
    capacity_bytes: int


def pack(blocks: Sequence[Block]) -> Packing:
    """Gives blocks that are held at the same time disjoint places, each rounded up to whole pages."""
    bound = live_bytes(blocks)
    best: Packing | None = None
    for order in _ORDERS:
        found = _first_fit(blocks, sorted(range(len(blocks)), key=lambda index: order(blocks[index])))
        if best is None or found.capacity_bytes < best.capacity_bytes:
            best = found
        if best.capacity_bytes == bound:
            break
    assert best is not None
    return best


def live_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes, in whole pages, held at one time: no packing needs less."""
    changes = sorted(
        change for block in blocks for change in ((block.start, _pages(block)), (block.stop, -_pages(block)))
    )
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


_ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda block: (-block.nbytes, block.start - block.stop),  # large ones first
    lambda block: (-block.nbytes * (block.stop - block.start),),  # large and long ones first
    lambda block: (block.start - block.stop, -block.nbytes),  # long ones first: a step's swaps are nested like brackets
    lambda block: (block.start, -block.nbytes),
)


def _pages(block: Block) -> int:
    return -(-block.nbytes // PAGE_BYTES) * PAGE_BYTES


def _first_fit(blocks: Sequence[Block], order: Sequence[int]) -> Packing:
    """Each block in turn goes to the lowest place that is free for as long as it is held."""
    placed = np.empty((0, 4), np.int64)  # rows (offset, end, start, stop), by offset
    offsets = [0] * len(blocks)
    for index in order:
        block, size = blocks[index], _pages(blocks[index])
        taken = placed[(placed[:, 2] < block.stop) & (block.start < placed[:, 3])]
        free_from = np.maximum.accumulate(np.concatenate(([0], taken[:, 1])))
        has_room = taken[:, 0] - free_from[:-1] >= size
        offset = int(free_from[has_room.argmax() if has_room.any() else -1])
        offsets[index] = offset
        row = (offset, offset + size, block.start, block.stop)
        placed = np.insert(placed, np.searchsorted(placed[:, 0], offset), row, axis=0)
    return Packing(tuple(offsets), int(placed[:, 1].max(initial=0)))


def assign_offsets(program: Program, swaps: Sequence[Swap]) -> tuple[tuple[Swap, ...], int]:
    """Gives each copy its place in the tier; returns the swaps with offsets, in their order, and the capacity.

    A place is held from a copy's out_start to the last first_use of the swaps that it serves.
    """
    copies: list[list[Swap]] = []
    latest: dict[int, list[Swap]] = {}
    for swap in sorted(swaps, key=lambda swap: swap.release):
        if swap.out_start is not None:
            latest[swap.buffer] = []
            copies.append(latest[swap.buffer])
        latest[swap.buffer].append(swap)
    blocks = [Block(_start(copy[0]), copy[-1].first_use + 1, program.buffers[copy[0].buffer].nbytes) for copy in copies]
    packing = pack(blocks)
    placed = {
        swap: replace(swap, offset=offset)
        for copy, offset in zip(copies, packing.offsets, strict=True)
        for swap in copy
    }
    return tuple(placed[swap] for swap in swaps), packing.capacity_bytes


def _start(swap: Swap) -> int:
    assert swap.out_start is not None
    return swap.out_start
