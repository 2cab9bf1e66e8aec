"""Offsets in the arena for the large tensors of a step: program + costs + plan → `ArenaLayout`.

torch's caching allocator is best-fit and online; by fragmentation it reserves up to twice the planned bytes. Here every
tensor gets a slot for its residency, so that a step takes one arena of known size. `lmswap.runtime.arena` makes the
allocator use these slots.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from lmswap.analyze.memory import StepMemory
from lmswap.ir.arena_layout import BLOCK_BYTES, SEPARATION_BYTES, SMALL_BYTES, ArenaLayout, Opening, Slot, slot_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import LOSS, BufferKind, Program
from lmswap.planner.memory.pack_tier import Block, live_bytes, pack

# The allocator's segments: of small tensors, of those below 10 MiB, and of a larger one alone, in whole units.
_SMALL_SEGMENT_BYTES, _SHARED_SEGMENT_BYTES = 2 * 2**20, 20 * 2**20
_OWN_SEGMENT_BYTES, _SEGMENT_UNIT_BYTES = 10 * 2**20, 2 * 2**20

# Of 21 steps (seven networks at 70, 50 and 30 %) arenas are 1.07 times the bytes held at once, and 1.16 at most;
# without it 1.10 and 1.31. It takes 0.1 s. `lmswap.planner.memory.fit_arena` does the rest.
_MAX_VISITS = 100_000_000

# Three moments at each position: dead buffers are free, prefetches allocate, the op allocates.
_MOMENTS, _COPY_IN, _OP = 3, 1, 2


def pack_arena(
    program: Program,
    costs: OpCosts,
    plan: Plan,
    *,
    num_held: Mapping[BufferKind, int] = MappingProxyType({BufferKind.OUTPUT: 1}),
) -> ArenaLayout:
    """Assigns a slot to every large tensor that the ops and prefetches of ``plan`` allocate, for its residency.

    Tangents and the scratch of losses have none: the caller allocates them. Tensors that the caller may hold during the
    next step are outside the arena; ``num_held`` is, by such kind, the number that may exist at once. Accumulated
    gradients become the caller's, or are added to one that is.

    Args:
        program: the planned step.
        costs: with the pieces that ops allocate.
        plan: its swaps and recomputes.
        num_held: by kind of result.
    """
    _, memory = StepMemory(program, costs).with_recomputes(plan.recomputes)
    residencies = _with_ambiguous_outside(
        _residencies(memory, plan.swaps, {BufferKind.ACCUMULATED_GRADIENT: 1, **num_held})
    )
    moved = {swap.buffer for swap in plan.swaps}
    kept_weights = (b for b in program.buffers if b.is_persistent and b.id not in moved)
    large = [residency for residency in residencies if residency.block.nbytes > SMALL_BYTES]
    inside, outside = (
        [residency for residency in large if bool(residency.num_held) == is_held] for is_held in (False, True)
    )
    packing = pack(_blocks(inside), BLOCK_BYTES, separation_bytes=SEPARATION_BYTES, max_visits=_MAX_VISITS)
    offsets: list[int | None] = [*packing.offsets, *[None] * len(outside)]
    found: dict[tuple[int, int], list[Slot]] = defaultdict(list)
    for offset, residency in zip(offsets, [*inside, *outside], strict=True):
        found[residency.allocated].append(Slot(offset, slot_bytes(residency.block.nbytes)))
    num_ops = len(memory.program.ops)
    for swap in plan.swaps:
        found.setdefault((_copy_in_moment(swap, num_ops), swap.buffer), [])
    openings = tuple(
        Opening(moment // _MOMENTS, moment % _MOMENTS == _COPY_IN, tuple(sorted(places, key=_by_offset)))
        for (moment, _), places in _in_order(found, plan.swaps, num_ops)
    )
    results_bytes = _results_bytes(outside) + _accumulated_bytes(memory)
    weight_bytes = sum(buffer.nbytes for buffer in kept_weights)
    return ArenaLayout(openings, packing.capacity_bytes, results_bytes, _small_bytes(residencies), weight_bytes)


def common_arena_bytes(steps: Iterable[tuple[ArenaLayout, int]], tolerated_bytes: int) -> int:
    """Size of an arena shared by several steps.

    The largest of their arenas, if it fits together with the results of each; else the smallest, and the arena is
    replaced where another step begins.

    Args:
        steps: (layout, limit in bytes) of each; at least one.
        tolerated_bytes: by which the limits may be exceeded.
    """
    placed = [*steps]
    sizes = [places.arena_bytes for places, _ in placed]
    outside_bytes = max(places.total_bytes - places.arena_bytes for places, _ in placed)
    fits = max(sizes) + outside_bytes <= min(max_bytes for _, max_bytes in placed) + tolerated_bytes
    return max(sizes) if fits else min(sizes)


@dataclass(frozen=True, slots=True)
class _Residency:
    """A tensor's residency in moments, and its allocation: the moment, and the buffer if it is a prefetch.

    Of equal ones that are allocated at once, the lowest ``rank`` gets the lowest offset; None if unknown.
    """

    allocated: tuple[int, int]
    block: Block
    rank: int | None
    num_held: int = 0  # number that the caller may hold at once; 0: not returned


def _residencies(memory: StepMemory, swaps: Sequence[Swap], num_held: Mapping[BufferKind, int]) -> list[_Residency]:
    program = memory.program
    swaps_of: dict[int, list[Swap]] = defaultdict(list)
    for swap in sorted(swaps, key=lambda swap: swap.release):
        swaps_of[swap.buffer].append(swap)
    residencies: list[_Residency] = []
    for buffer, live_range in memory.ranges.items():
        kind, nbytes = program.buffers[buffer].kind, program.buffers[buffer].nbytes
        if program.buffers[buffer].is_persistent:
            residencies += _fetched(swaps_of[buffer], nbytes, len(program.ops))
            continue
        if kind is BufferKind.TANGENT or not live_range.writes:
            continue
        start, allocated = _MOMENTS * live_range.start + _OP, (_MOMENTS * live_range.start + _OP, 0)
        rank = _rank(memory, buffer, live_range.start)
        for swap in swaps_of[buffer]:
            residencies.append(
                _Residency(allocated, Block(start, _MOMENTS * swap.release, nbytes), rank, num_held.get(kind, 0))
            )
            start = _MOMENTS * swap.in_start + _COPY_IN
            allocated, rank = (start, buffer), 0
        residencies.append(
            _Residency(allocated, Block(start, _MOMENTS * live_range.stop, nbytes), rank, num_held.get(kind, 0))
        )
    for op in program.ops:
        start = _MOMENTS * op.index + _OP
        for rank, piece in enumerate(memory.costs.of(op.index)):
            if op.target != LOSS and piece.result is None:
                residencies.append(_Residency((start, 0), Block(start, start + 1, piece.nbytes), rank))
    return [residency for residency in residencies if residency.block.nbytes]


def _fetched(swaps: Sequence[Swap], nbytes: int, num_ops: int) -> Iterator[_Residency]:
    """Yield the residencies of a weight that is only read, and non-resident at the step's end; ``swaps`` by release."""
    moments = sorted((_copy_in_moment(swap, num_ops), swap.buffer) for swap in swaps)
    for (start, buffer), swap in zip(moments, swaps, strict=True):
        yield _Residency((start, buffer), Block(start, _MOMENTS * swap.release, nbytes), 0)


def _copy_in_moment(swap: Swap, num_ops: int) -> int:
    return _COPY_IN + _MOMENTS * swap.fetch(num_ops)[0]


def _with_ambiguous_outside(residencies: Sequence[_Residency]) -> list[_Residency]:
    """Tensors allocated together with a result of the same size go outside too: which gets which is unknown."""
    results = {
        (residency.allocated, slot_bytes(residency.block.nbytes)) for residency in residencies if residency.num_held
    }
    return [
        replace(residency, num_held=max(1, residency.num_held))
        if (residency.allocated, slot_bytes(residency.block.nbytes)) in results
        else residency
        for residency in residencies
    ]


def _rank(memory: StepMemory, buffer: int, op: int) -> int | None:
    """Index of the piece of ``op`` that becomes ``buffer``; None if unknown."""
    result = memory.program.ops[op].writes.index(buffer)
    return next((rank for rank, piece in enumerate(memory.costs.of(op)) if piece.result == result), None)


def _blocks(residencies: Sequence[_Residency]) -> list[Block]:
    """Blocks to pack, with their order and distance constraints.

    The allocator uses low addresses first. Equal tensors allocated at once get the union of their lifetimes where their
    order is unknown. Adjacent free ranges would be one block to it, so tensors allocated at once do not touch.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, residency in enumerate(residencies):
        groups[residency.allocated].append(index)
    blocks = [residency.block for residency in residencies]
    for number, group in enumerate(groups.values()):
        alike: dict[int, list[int]] = defaultdict(list)
        for index in group:
            blocks[index] = replace(blocks[index], group=number)
            alike[slot_bytes(blocks[index].nbytes)].append(index)
        for equal in alike.values():
            ranks = {rank: index for index in equal if (rank := residencies[index].rank) is not None}
            if len(ranks) == len(equal):
                for below, above in pairwise(sorted(ranks)):
                    blocks[ranks[above]] = replace(blocks[ranks[above]], above=ranks[below])
            else:
                start, stop = min(blocks[index].start for index in equal), max(blocks[index].stop for index in equal)
                for index in equal:
                    blocks[index] = replace(blocks[index], start=start, stop=stop)
    return blocks


def _in_order(
    found: dict[tuple[int, int], list[Slot]], swaps: Sequence[Swap], num_ops: int
) -> list[tuple[tuple[int, int], list[Slot]]]:
    """By moment; prefetches of one moment in the order of the plan."""
    rank = {(_copy_in_moment(swap, num_ops), swap.buffer): number for number, swap in enumerate(swaps)}
    return sorted(found.items(), key=lambda item: (item[0][0], rank.get(item[0], 0)))


def _by_offset(place: Slot) -> tuple[bool, int]:
    return place.offset is None, place.offset or 0


def _results_bytes(results: Iterable[_Residency]) -> int:
    """Bytes of the segments that the allocator reserves for them: large tensors have one each."""
    own_bytes, shared = 0, list[int]()  # of shared segments: bytes used
    together = Counter[tuple[int, int]]()
    for residency in results:
        nbytes = slot_bytes(residency.block.nbytes)
        if nbytes >= _OWN_SEGMENT_BYTES:
            own_bytes += residency.num_held * -(-nbytes // _SEGMENT_UNIT_BYTES) * _SEGMENT_UNIT_BYTES
            continue
        together[residency.allocated] += 1
        for _ in range(residency.num_held):
            fitting = (number for number, allocated in enumerate(shared) if allocated + nbytes <= _SHARED_SEGMENT_BYTES)
            if (number := next(fitting, None)) is None:
                shared.append(nbytes)
            else:
                shared[number] += nbytes
    # Tensors allocated at once do not touch, which may need another one.
    apart = any(count > 1 for count in together.values())
    return own_bytes + (len(shared) + apart) * _SHARED_SEGMENT_BYTES


def _accumulated_bytes(memory: StepMemory) -> int:
    """Bytes of gradients until they are added to the caller's."""
    kind_of, ranges = memory.program.buffers, memory.ranges.values()
    added = [
        Block(r.start, r.stop, kind_of[r.buffer].nbytes)
        for r in ranges
        if kind_of[r.buffer].kind is BufferKind.ACCUMULATED_GRADIENT
    ]
    at_once_bytes = live_bytes(added, _SEGMENT_UNIT_BYTES)
    return at_once_bytes + _SHARED_SEGMENT_BYTES if added else 0


def _small_bytes(residencies: Sequence[_Residency]) -> int:
    """Whole segments for the peak of small tensors, and one more for fragmentation."""
    max_bytes = live_bytes(
        [residency.block for residency in residencies if residency.block.nbytes <= SMALL_BYTES], unit_bytes=1
    )
    return (-(-max_bytes // _SMALL_SEGMENT_BYTES) + 1) * _SMALL_SEGMENT_BYTES
