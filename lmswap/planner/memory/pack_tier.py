"""Dynamic storage allocation: lifetimes and sizes of blocks → offsets and the capacity to reserve.

In a tier blocks are the copies of swapped buffers, in whole pages; `pack_arena` packs device tensors.

Dynamic storage allocation is NP-hard; the bytes live at once are a lower bound. See csrc/planner/pack.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Program
from lmswap.planner import _core

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes for one buffer, held over the positions [start, stop).

    ``above`` is the index of a block that must have a lower offset; blocks of one ``group`` do not touch.
    """

    start: int
    stop: int
    nbytes: int
    above: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Packing:
    """An offset for each block, all multiples of the unit, and the bytes from 0 to the end of the highest block."""

    offsets: tuple[int, ...]
    capacity_bytes: int


def pack(
    blocks: Sequence[Block], unit_bytes: int = PAGE_BYTES, *, separation_bytes: int = 0, max_visits: int = 0
) -> Packing:
    """Gives blocks that are held at the same time disjoint ranges, each rounded up to whole units.

    Ranges touch each other, and offset 0, or are at least ``separation_bytes`` apart. The best of a few orders of
    first fit, improved for ``max_visits`` comparisons of two blocks (1e8 take some 0.1 s).
    """
    rows = [
        (block.start, block.stop, _rounded(block.nbytes, unit_bytes), _or_none(block.above), _or_none(block.group))
        for block in blocks
    ]
    offsets, capacity_bytes = _core.pack(rows, separation_bytes=separation_bytes, max_visits=max_visits)
    return Packing(tuple(offsets), capacity_bytes)


def _or_none(number: int | None) -> int:
    return -1 if number is None else number


def live_bytes(blocks: Sequence[Block], unit_bytes: int = PAGE_BYTES) -> int:
    """The most bytes, in whole units, held at one time: no packing needs less."""
    sizes = [_rounded(block.nbytes, unit_bytes) for block in blocks]
    changes = sorted(
        change
        for block, nbytes in zip(blocks, sizes, strict=True)
        for change in ((block.start, nbytes), (block.stop, -nbytes))
    )
    held = peak_bytes = 0
    for _, change in changes:
        held += change
        peak_bytes = max(peak_bytes, held)
    return peak_bytes


def _rounded(nbytes: int, unit_bytes: int) -> int:
    return -(-nbytes // unit_bytes) * unit_bytes


def page_bytes(nbytes: int) -> int:
    """``nbytes`` in whole pages of a tier."""
    return _rounded(nbytes, PAGE_BYTES)


def host_copy_bytes(program: Program, plan: Plan) -> int:
    """Bytes of a tier that host copies of persistent buffers hold for good."""
    moved = {swap.buffer for swap in plan.swaps}
    return sum(page_bytes(b.nbytes) for b in program.buffers if b.is_persistent and b.id in moved)


def assign_offsets(program: Program, swaps: Sequence[Swap]) -> tuple[tuple[Swap, ...], int]:
    """Assigns tier offsets to copies; returns the swaps with offsets, in their order, and the capacity.

    A range is held from a copy's out_start to the last first_use of the swaps that read it; that of a persistent
    buffer for good, above all others.
    """
    copies: list[list[Swap]] = []
    latest: dict[int, list[Swap]] = {}
    for swap in sorted(swaps, key=lambda swap: swap.release):
        is_persistent = program.buffers[swap.buffer].is_persistent
        if swap.buffer not in latest if is_persistent else swap.out_start is not None:
            latest[swap.buffer] = []
            copies.append(latest[swap.buffer])
        latest[swap.buffer].append(swap)
    held = [copy for copy in copies if not program.buffers[copy[0].buffer].is_persistent]
    for_good = [copy for copy in copies if program.buffers[copy[0].buffer].is_persistent]
    packing = pack(
        [Block(_start(copy[0]), copy[-1].first_use + 1, program.buffers[copy[0].buffer].nbytes) for copy in held]
    )
    offsets, capacity_bytes = [*packing.offsets], packing.capacity_bytes
    for copy in for_good:
        offsets.append(capacity_bytes)
        capacity_bytes += page_bytes(program.buffers[copy[0].buffer].nbytes)
    placed = {
        swap: replace(swap, offset=offset)
        for copy, offset in zip([*held, *for_good], offsets, strict=True)
        for swap in copy
    }
    return tuple(placed[swap] for swap in swaps), capacity_bytes


def _start(swap: Swap) -> int:
    assert swap.out_start is not None
    return swap.out_start
