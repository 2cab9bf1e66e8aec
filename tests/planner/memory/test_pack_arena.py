"""Slots of the arena: each large tensor has one for as long as it is there, and no two share bytes meanwhile."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.ir.arena_layout import BLOCK_BYTES, SEPARATION_BYTES, SMALL_BYTES, ArenaLayout, Slot, slot_bytes
from lmswap.ir.costs import OpCosts, Piece
from lmswap.ir.plan import Plan
from lmswap.ir.program import LOSS, BufferKind, Op, Program
from lmswap.ir.schedule import schedule
from lmswap.planner.memory.pack_arena import common_arena_bytes, pack_arena
from tests.ir.build import Step, build
from tests.ir.strategies import steps
from tests.planner.random_swaps import random_plans

SCALE = 300_000  # buffers of up to 9 bytes become of up to 2.6 MiB, on both sides of what has a place


def scaled(step: Step) -> tuple[Program, OpCosts]:
    buffers = tuple(replace(buffer, nbytes=buffer.nbytes * SCALE) for buffer in step.program.buffers)
    scratch = tuple(nbytes * SCALE for nbytes in step.costs.scratch_bytes)
    return replace(step.program, buffers=buffers), replace(step.costs, scratch_bytes=scratch)


def with_pieces(program: Program, costs: OpCosts, random: Random) -> OpCosts:
    """``costs`` of ops that ask for their results and for one or two pieces of scratch in any order."""
    pieces = []
    for op in program.ops:
        scratch_bytes = costs.scratch_bytes[op.index]
        count = random.choice([1, 2]) if scratch_bytes % 2 == 0 else 1
        taken = [Piece(scratch_bytes // count)] * count
        taken += [Piece(program.buffers[buffer].nbytes, result) for result, buffer in enumerate(op.writes)]
        random.shuffle(taken)
        pieces.append(tuple(taken))
    return replace(costs, pieces=tuple(pieces))


def hole_bytes(one: Slot, other: Slot) -> int:
    """Between them in the arena; negative where they share bytes."""
    assert one.offset is not None and other.offset is not None
    return max(one.offset - other.offset - other.nbytes, other.offset - one.offset - one.nbytes)


class Replay:
    """Runs a step op by op on an allocator that takes the smallest free place that is large enough, and the lowest.

    Those beside the arena lie below or above it.
    """

    def __init__(self, program: Program, costs: OpCosts, plan: Plan, places: ArenaLayout, random: Random) -> None:
        """Where ``costs`` do not say in which order an op allocates, ``random`` does."""
        runs = schedule(program, plan.recomputes)
        self.program, self.costs, self.plan, self.places = runs.program, runs.costs(costs), plan, places
        self.random = random
        self.openings = list(places.openings)
        self.at: dict[object, Slot] = {}
        self.num_placed = 0

    def run(self) -> None:
        uses: dict[int, list[int]] = {}
        for op in self.program.ops:
            for buffer in {*op.reads, *op.writes}:
                uses.setdefault(buffer, []).append(op.index)
        for op in self.program.ops:
            for buffer in [buffer for buffer in self.at if self.has_died(buffer, uses, op.index)]:
                del self.at[buffer]
            for swap in self.plan.swaps:
                if swap.release == op.index:
                    self.at.pop(swap.buffer, None)
            for swap in self.plan.swaps:
                if swap.in_start == op.index:
                    self.take(op.index, is_prefetch=True, tensors=[(swap.buffer, self.nbytes(swap.buffer))])
            made = self.made(op, uses)
            if any(nbytes > SMALL_BYTES for _, nbytes in made):
                self.take(op.index, is_prefetch=False, tensors=made)
            for scratch in [key for key in self.at if isinstance(key, tuple)]:
                del self.at[scratch]
        assert not self.openings

    def made(self, op: Op, uses: dict[int, list[int]]) -> list[tuple[object, int]]:
        """The allocations of ``op``, in order."""
        pieces = self.costs.of(op.index)
        asked: list[tuple[object, int]] = []
        for number, piece in enumerate(pieces):
            if piece.result is not None:
                buffer = op.writes[piece.result]
                asked += [(buffer, self.nbytes(buffer))] if self.is_made(buffer, uses, op.index) else []
            elif op.target != LOSS:
                asked.append((("scratch", number), piece.nbytes))
        if not any(piece.result is not None for piece in pieces):
            asked += [(buffer, self.nbytes(buffer)) for buffer in op.writes if self.is_made(buffer, uses, op.index)]
            self.random.shuffle(asked)
        return asked

    def has_died(self, buffer: object, uses: dict[int, list[int]], op: int) -> bool:
        assert isinstance(buffer, int)
        lasts = self.program.buffers[buffer].kind in (BufferKind.OUTPUT, BufferKind.GRADIENT)
        return not lasts and uses[buffer][-1] < op

    def is_made(self, buffer: int, uses: dict[int, list[int]], op: int) -> bool:
        kind = self.program.buffers[buffer].kind
        outside = kind in (BufferKind.TANGENT, BufferKind.PARAMETER, BufferKind.INPUT)
        return not outside and uses[buffer][0] == op

    def nbytes(self, buffer: int) -> int:
        return self.program.buffers[buffer].nbytes

    def take(self, position: int, *, is_prefetch: bool, tensors: list[tuple[object, int]]) -> None:
        opening = self.openings.pop(0)
        assert (opening.position, opening.is_prefetch) == (position, is_prefetch)
        beside = self.random.choice([-1, 2**60])
        free = sorted(opening.slots, key=lambda place: (place.nbytes, beside if place.offset is None else place.offset))
        ends = {place.offset + place.nbytes for place in opening.slots if place.offset is not None}
        assert not any(place.offset in ends for place in opening.slots)  # or they would be one free block
        for tensor, nbytes in tensors:
            if nbytes <= SMALL_BYTES:
                continue
            place = next(place for place in free if place.nbytes >= nbytes)
            free.remove(place)
            assert place.nbytes == slot_bytes(nbytes)
            self.num_placed += 1
            if isinstance(tensor, int) and self.program.buffers[tensor].kind is BufferKind.OUTPUT:
                assert place.offset is None
            if place.offset is None:
                continue
            assert place.offset % BLOCK_BYTES == 0
            assert place.offset + place.nbytes <= self.places.arena_bytes
            holes = [hole_bytes(place, other) for other in self.at.values()]
            assert all(hole == 0 or hole >= SEPARATION_BYTES for hole in [place.offset, *holes])
            self.at[tensor] = place
        assert not free


@given(st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_every_large_tensor_has_a_slot_during_its_residency(data: st.DataObject, knows_pieces: bool, random: Random):
    step = data.draw(steps())
    plan = data.draw(random_plans(step))
    program, costs = scaled(step)
    if knows_pieces:
        costs = with_pieces(program, costs, random)
    Replay(program, costs, plan, pack_arena(program, costs, plan), random).run()


def large_step() -> tuple[Program, OpCosts]:
    step = build("inference\nf1 1: x -> a b\nf2 1: a -> c\nf3 1: b c -> y", sizes=dict.fromkeys("abcy", 8))
    return scaled(step)


def test_the_arena_is_no_larger_than_the_resident_bytes():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> b\nf3 1: b -> c\nf4 1: b c -> y", sizes=dict.fromkeys("abcy", 8))
    program, costs = scaled(step)
    plan = Plan("none", 2**40, (), 0.0, 0)
    places = pack_arena(program, costs, plan)
    replay = Replay(program, costs, plan, places, Random(1))
    replay.run()
    assert replay.num_placed == 4
    assert places.arena_bytes == 3 * slot_bytes(8 * SCALE)


def test_equal_slots_of_unknown_order_are_both_held_to_the_later_end():
    program, costs = large_step()  # a and b are made by one op, a dies first
    places = pack_arena(program, costs, Plan("none", 2**40, (), 0.0, 0))
    assert {place.offset for place in places.openings[0].slots}.isdisjoint(
        {place.offset for place in places.openings[2].slots}
    )
    assert places.arena_bytes == 4 * slot_bytes(8 * SCALE)


@pytest.mark.parametrize("lower", [0, 1])
def test_of_equal_slots_of_known_order_the_first_freed_is_reused(lower: int):
    program, costs = large_step()
    taken = (Piece(8 * SCALE, lower), Piece(8 * SCALE, 1 - lower))
    costs = replace(costs, pieces=(taken, (Piece(0),), (Piece(0),)))
    places = pack_arena(program, costs, Plan("none", 2**40, (), 0.0, 0))
    a = sorted(places.openings[0].slots, key=lambda place: place.offset)[lower]
    assert a in places.openings[2].slots
    assert places.arena_bytes <= 3 * slot_bytes(8 * SCALE) + SEPARATION_BYTES


def test_scratch_as_large_as_the_result_holds_its_slot_during_the_op_only():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> y", sizes={"a": 8, "y": 8})
    program, costs = scaled(step)
    costs = replace(
        costs, scratch_bytes=(8 * SCALE, 0), pieces=((Piece(8 * SCALE, 0), Piece(8 * SCALE)), (Piece(8 * SCALE, 0),))
    )
    places = pack_arena(program, costs, Plan("none", 2**40, (), 0.0, 0), num_held={})
    assert places.arena_bytes <= 2 * slot_bytes(8 * SCALE) + SEPARATION_BYTES


MIB = 2**20


@pytest.mark.parametrize(
    ("size", "count", "segments_bytes"),
    [
        (11.5 * MIB, 1, 12 * MIB),
        (11.5 * MIB, 2, 24 * MIB),
        (7 * MIB, 1, 20 * MIB),
        (7 * MIB, 2, 20 * MIB),
        (7 * MIB, 3, 40 * MIB),
        (0.5 * MIB, 2, 0),
    ],
)
def test_results_are_counted_outside_the_arena_as_often_as_held(size: float, count: int, segments_bytes: int):
    step = build("inference\nf1 1: x -> a b\nf2 1: a b -> y", outputs="y")
    large = {"a": 8 * MIB, "b": 8 * MIB, "y": int(size)}
    named = zip(step.program.buffers, step.program.buffer_names, strict=True)
    program = replace(step.program, buffers=tuple(replace(buffer, nbytes=large.get(name, 1)) for buffer, name in named))
    plan = Plan("none", 2**40, (), 0.0, 0)
    places = pack_arena(program, step.costs, plan, num_held={BufferKind.OUTPUT: count})
    assert all(place.offset is not None for place in places.openings[0].slots)
    assert [place.offset for opening in places.openings[1:] for place in opening.slots] == [None] * bool(segments_bytes)
    assert places.results_bytes == segments_bytes
    assert places.total_bytes == places.arena_bytes + segments_bytes + places.small_bytes


def test_tensors_allocated_with_an_equal_result_are_outside_the_arena():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> b y\nf3 1: b -> c", sizes=dict.fromkeys("abcy", 8), outputs="y")
    places = pack_arena(*scaled(step), Plan("none", 2**40, (), 0.0, 0))
    offsets = [[place.offset for place in opening.slots] for opening in places.openings]
    assert offsets[1] == [None, None]
    assert None not in offsets[0] + offsets[2]


def test_small_tensors_have_no_slot_but_are_counted():
    step = build("inference\nf1 1: x -> a\nf2 1: a -> y", sizes={"a": 1, "y": 1})
    places = pack_arena(*scaled(step), Plan("none", 2**40, (), 0.0, 0))
    assert not places.openings
    assert places.arena_bytes == 0
    assert places.small_bytes >= 2 * SCALE


def test_steps_share_the_largest_arena_if_it_fits_with_all_results():
    training, validation = ArenaLayout((), 100, 60, 5), ArenaLayout((), 180, 0, 5)
    assert common_arena_bytes([(training, 250), (validation, 250)], 0) == 180
    assert common_arena_bytes([(training, 244), (validation, 250)], 0) == 100
    assert common_arena_bytes([(training, 244), (validation, 250)], 1) == 180
    assert common_arena_bytes([(training, 10)], 0) == 100  # no plan was found that fits
