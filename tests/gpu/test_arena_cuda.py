"""The arena: torch's own allocator puts tensors where they were planned to lie, and never two into one place."""

import gc
import itertools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, SimpleNamespace

import pytest
import torch

from lmswap.ir.arena_layout import SEPARATION_BYTES, Slot
from lmswap.runtime.arena import Arena, SegmentOpenings, unused_arena_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda:0")
UNIT_BYTES = SEPARATION_BYTES  # in which most places here are said


def place(first: int, count: int) -> Slot:
    return Slot(first * UNIT_BYTES, count * UNIT_BYTES)


def tensor(count: int) -> torch.Tensor:
    return torch.empty(count * UNIT_BYTES - 100_000, dtype=torch.uint8, device=DEVICE)


@pytest.fixture
def arena():
    gc.collect()
    torch.cuda.empty_cache()
    arena = Arena(DEVICE)
    arena.resize(40 * UNIT_BYTES)
    yield arena
    arena.close()


def first_address(arena: Arena) -> int:
    with arena.segment(SegmentOpenings([[place(0, 40)]])), arena.allocating():
        arena.open_next()
        return tensor(40).data_ptr()


def test_tensors_are_at_their_planned_offsets(arena):
    base = first_address(arena)
    places = [[place(30, 4)], [place(2, 7), place(20, 3)], [place(9, 11)], [place(0, 2)]]
    script = SegmentOpenings(places)
    for _ in range(3):  # worked out in the first run, repeated in the others
        with arena.segment(script), arena.allocating():
            made = []
            for opening in places:
                arena.open_next()
                made += [tensor(p.nbytes // UNIT_BYTES) for p in opening]
            assert [(t.data_ptr() - base) // UNIT_BYTES for t in made] == [30, 2, 20, 9, 0]
            del made
    assert arena.num_unplaced == 0


def test_an_extent_is_reused_after_its_tensor_has_died(arena):
    base = first_address(arena)
    script = SegmentOpenings([[place(0, 10)], [place(10, 30)], [place(4, 20)]])
    for _ in range(2):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            first = tensor(10)
            arena.open_next()
            second = tensor(30)
            del first, second
            arena.open_next()
            assert (tensor(20).data_ptr() - base) // UNIT_BYTES == 4
    assert arena.num_unplaced == 0


def test_a_tensor_kept_longer_than_planned_is_not_overwritten(arena):
    first_address(arena)
    script = SegmentOpenings([[place(0, 10)], [place(5, 10)]])
    kept = []
    for number in range(3):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            kept.append(tensor(10).fill_(number))
            arena.open_next()
            kept.append(tensor(10).fill_(100 + number))
    assert arena.num_unplaced > 0
    for number in range(3):
        assert (kept[2 * number] == number).all()
        assert (kept[2 * number + 1] == 100 + number).all()


def test_planned_offsets_are_used_again_once_retained_tensors_are_freed(arena):
    base = first_address(arena)
    script = SegmentOpenings([[place(0, 10)], [place(10, 30)], [place(0, 3)]])
    for number in range(4):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            kept = [tensor(10)]
            arena.open_next()
            tensor(30)
            if number > 0:
                kept.clear()
            arena.open_next()
            last = tensor(3)
            beside = tensor(31) if number == 0 else None  # for which the allocator takes more of the device
            assert (last.data_ptr() == base) == (number > 0)
        del last, beside, kept
        base = first_address(arena)  # it is recreated, without what the allocator took
        assert arena.reserved_bytes <= 42 * UNIT_BYTES
    assert arena.num_unplaced == 1


def test_memory_between_tensors_is_counted_until_freed_at_the_end(arena):
    before = torch.cuda.memory_allocated()
    with arena.segment(SegmentOpenings([[place(3, 5)]])), arena.allocating():
        arena.open_next()
        x = tensor(5)
        assert torch.cuda.memory_allocated() - before - unused_arena_bytes(DEVICE) == 5 * UNIT_BYTES
        assert unused_arena_bytes(DEVICE) > 0
    assert unused_arena_bytes(DEVICE) == 0
    assert torch.cuda.memory_allocated() - before == 5 * UNIT_BYTES
    del x
    assert torch.cuda.memory_allocated() == before


def test_allocations_between_segment_parts_are_outside_the_arena(arena):
    base = first_address(arena)
    script = SegmentOpenings([[place(0, 10)], [place(20, 2)], [place(30, 2)]])
    for _ in range(3):
        with arena.segment(script):
            with arena.allocating():
                arena.open_next()
                first = tensor(10)
                arena.open_next()
                second = tensor(2)
            outside = tensor(3)
            assert not base <= outside.data_ptr() < base + 40 * UNIT_BYTES
            del second  # leaves a gap that the next tensor would fit into
            with arena.allocating():
                arena.open_next()
                third = tensor(2)
            assert [(t.data_ptr() - base) // UNIT_BYTES for t in (first, third)] == [0, 30]
        del first, third, outside
    assert arena.num_unplaced == 0


def test_an_exception_in_a_segment_leaves_nothing_held(arena):
    before = torch.cuda.memory_allocated()
    with pytest.raises(ZeroDivisionError), arena.segment(SegmentOpenings([[place(3, 5)]])), arena.allocating():
        arena.open_next()
        1 / 0  # noqa: B018
    assert torch.cuda.memory_allocated() == before
    assert unused_arena_bytes(DEVICE) == 0


def interrupted_at(number: int, codes: set[CodeType]) -> Callable[[FrameType, str, object], object]:
    """For sys.settrace: what raises, like a signal's handler, before instruction ``number`` of functions ``codes``."""
    left = iter(range(number, -1, -1))

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left, -1) == 0:
            raise KeyboardInterrupt
        return trace

    return trace


def test_a_signal_at_any_moment_leaves_nothing_held(arena):
    before, base = torch.cuda.memory_allocated(), first_address(arena)
    script = SegmentOpenings([[place(3, 5)], [place(20, 2)]])
    codes = {function.__code__ for function in (Arena._begin, Arena._open, Arena._execute)}
    for number in itertools.count():
        script.known.clear()
        sys.settrace(interrupted_at(number, codes))
        try:
            with arena.segment(script), arena.allocating():
                arena.open_next()
                arena.open_next()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        with arena.segment(script), arena.allocating():
            arena.open_next()
            assert tensor(5).data_ptr() - base == 3 * UNIT_BYTES
        assert torch.cuda.memory_allocated() == before
        assert unused_arena_bytes(DEVICE) == 0
    assert number > 100


def test_reading_a_pool_keeps_the_reference_counts_of_its_id(arena, monkeypatch):
    """Torch does, and numbers above 256 are objects that are freed."""
    numbers = (int("1000001"), int("1000002"))  # made at run time: no other references exist
    monkeypatch.setattr(arena, "_pool", SimpleNamespace(id=numbers))
    before = [*map(sys.getrefcount, numbers)]
    for _ in range(10):
        assert arena.reserved_bytes == 0  # there is no such pool
    assert all(now >= was for now, was in zip(map(sys.getrefcount, numbers), before, strict=True))


def test_an_arena_is_recreated_on_the_stream_of_the_next_step(arena):
    before, stream = first_address(arena), torch.cuda.Stream()
    reserved_bytes = arena.reserved_bytes
    with torch.cuda.stream(stream):
        arena.begin_step()
        base = first_address(arena)
        with arena.segment(SegmentOpenings([[place(7, 2)]])), arena.allocating():
            arena.open_next()
            assert tensor(2).data_ptr() - base == 7 * UNIT_BYTES
    assert arena.reserved_bytes == reserved_bytes
    arena.begin_step()
    assert arena.reserved_bytes == 0
    assert first_address(arena) == before


def test_a_closed_arena_holds_no_device_memory(arena):
    reserved = torch.cuda.memory_reserved()
    first_address(arena)
    assert arena.reserved_bytes >= 40 * UNIT_BYTES
    arena.close()
    torch.cuda.empty_cache()
    assert arena.reserved_bytes == 0
    assert torch.cuda.memory_reserved() == reserved


def test_an_arena_is_as_large_as_the_segment_that_runs_needs_it(arena):
    small, large = (
        SegmentOpenings([[place(0, 30)]], 30 * UNIT_BYTES),
        SegmentOpenings([[place(0, 60)]], 60 * UNIT_BYTES),
    )
    any_size = SegmentOpenings([[place(0, 20)]])
    arena.resize(20 * UNIT_BYTES)
    seen = []
    for script, count in ((small, 30), (large, 60), (small, 30), (any_size, 20), (large, 60)):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            tensor(count)
        seen.append(arena.nbytes // UNIT_BYTES)
        assert arena.nbytes <= arena.reserved_bytes <= arena.nbytes + 2 * 2**20
    assert seen == [30, 60, 30, 20, 60]


def test_an_idle_arena_releases_its_memory_until_the_next_segment(
    arena,
):
    script = SegmentOpenings([[place(0, 10)], [place(10, 30)]])
    for is_kept in (False, True):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            arena.release_if_empty()  # not while a segment runs
            kept = tensor(10)
            arena.open_next()
            tensor(30)
        if not is_kept:
            del kept
        reserved = torch.cuda.memory_reserved()
        arena.release_if_empty()
        gone = reserved - torch.cuda.memory_reserved()
        assert gone == 0 if is_kept else gone >= arena.nbytes
    assert arena.num_unplaced == 0


def test_foreign_allocations_are_outside_of_the_arena(arena):
    base = first_address(arena)
    outside = [tensor(3) for _ in range(5)]
    assert all(not base <= t.data_ptr() < base + 40 * UNIT_BYTES for t in outside)


def test_extents_are_at_planned_offsets_whichever_neighbors_were_freed(arena):
    base = first_address(arena)
    half = 2**19  # a rest of which cannot be held
    # Of each: its place, and when it comes and dies. What died is held by itself: later ones go over its borders.
    lives = [(0, 6, 0, 1), (20, 4, 1, 2), (7, 8, 2, 3), (16, 7, 3, 4), (5, 11, 3, 5), (0, 5, 4, 5), (3, 20, 5, 6)]
    lives = [(offset * half, nbytes * half, start, stop) for offset, nbytes, start, stop in lives]
    script = SegmentOpenings([[Slot(offset, nbytes)] for offset, nbytes, *_ in lives])
    for _ in range(3):
        held: dict[int, torch.Tensor] = {}
        with arena.segment(script), arena.allocating():
            for number, (offset, nbytes, start, _) in enumerate(lives):
                held = {other: tensor for other, tensor in held.items() if lives[other][3] > start}
                arena.open_next()
                held[number] = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
                assert held[number].data_ptr() - base == offset
        held.clear()
    assert arena.num_unplaced == 0


def test_segments_leave_the_interpreter_all_references_to_its_constants(arena):
    script = SegmentOpenings([[place(3, 5)]])

    def run() -> None:
        for _ in range(100):
            with arena.segment(script), arena.allocating():
                arena.open_next()
                tensor(5)
            assert arena.reserved_bytes > 0

    run()
    before = sys.getrefcount(True), sys.getrefcount(False)
    run()
    assert abs(sys.getrefcount(True) - before[0]) < 50 > abs(sys.getrefcount(False) - before[1])


def anywhere(count: int) -> Slot:
    return Slot(None, count * UNIT_BYTES)


def test_results_are_outside_the_arena_and_alternate_between_two_blocks(arena):
    base = first_address(arena)
    script, seen, result = SegmentOpenings([[place(3, 14), anywhere(15)], [place(20, 15)], [anywhere(4)]]), [], None
    for number in range(6):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            inner, made = tensor(14), tensor(15).fill_(number)
            arena.open_next()
            later = tensor(15)
            assert [(t.data_ptr() - base) // UNIT_BYTES for t in (inner, later)] == [3, 20]
            arena.open_next()
            small = tensor(4)
        if result is not None:
            assert (result == number - 1).all()
        result = made
        seen.append((made.data_ptr(), small.data_ptr(), arena.reserved_bytes))
        del inner, made, later, small
    assert arena.num_unplaced == 0
    assert not any(base <= address < base + 40 * UNIT_BYTES for *addresses, _ in seen for address in addresses)
    assert len({made for made, *_ in seen}) == 2
    assert seen[1:3] == seen[3:5]  # nothing more is taken of the device


def test_results_added_to_others_free_their_memory_for_the_next_ones(arena):
    base = first_address(arena)
    script = SegmentOpenings([[anywhere(6)], [place(3, 5)], [anywhere(6)], [place(20, 5)]])
    held, reserved_bytes = [], []
    for _ in range(4):
        for adds_up in (False, True):
            with arena.segment(script, adds_up=adds_up):
                for position in (3, 20):
                    with arena.allocating():
                        arena.open_next()
                        result = tensor(6)
                        arena.open_next()
                        assert tensor(5).data_ptr() - base == position * UNIT_BYTES
                    if not adds_up:
                        held.append(result)
                    del result
            reserved_bytes.append(arena.reserved_bytes)
        held.clear()
    assert arena.num_unplaced == 0
    assert len({*reserved_bytes[1:]}) == 1


@pytest.mark.parametrize("leaves_room_before", [False, True])
def test_free_memory_outside_the_arena_may_be_as_large_as_a_gap_inside(arena, leaves_room_before):
    """Of equal blocks the allocator returns that of its older segment first, not the lower one."""
    before = tensor(64) if leaves_room_before else None
    base = first_address(arena)
    del before
    torch.cuda.empty_cache()
    forward, backward = SegmentOpenings([[anywhere(6)], [place(6, 34)]]), SegmentOpenings([[place(0, 6)]])
    held = None
    for _ in range(4):
        with arena.segment(forward), arena.allocating():
            arena.open_next()
            result = tensor(6)
            arena.open_next()
            saved = tensor(34)
        assert held is None or held.data_ptr() != result.data_ptr()
        held = result  # that of the step before dies
        with arena.segment(backward), arena.allocating():
            arena.open_next()
            assert tensor(6).data_ptr() == base
        del saved
    assert arena.num_unplaced == 0


def test_two_adjacent_results_are_not_taken_for_one_of_twice_the_size(arena):
    base = first_address(arena)
    script = SegmentOpenings([[place(3, 8), anywhere(4), anywhere(4)], [place(20, 2)]])
    for _ in range(4):
        with arena.segment(script), arena.allocating():
            arena.open_next()
            large, *results = tensor(8), tensor(4), tensor(4)
            arena.open_next()
            other = tensor(2)
            assert [(t.data_ptr() - base) // UNIT_BYTES for t in (large, other)] == [3, 20]
            assert not any(base <= t.data_ptr() < base + 40 * UNIT_BYTES for t in results)
        del large, results, other
    assert arena.num_unplaced == 0


@pytest.mark.parametrize("count", [30, 50])
def test_an_arena_is_recreated_while_results_of_the_last_step_are_held(arena, count):
    def run(*places: Slot) -> torch.Tensor:
        with arena.segment(SegmentOpenings([[places[0]], [places[1]]])), arena.allocating():
            arena.open_next()
            tensor(places[0].nbytes // UNIT_BYTES)
            arena.open_next()
            return tensor(12)

    for number in range(3):
        result = run(place(0, 40), anywhere(12)).fill_(number)
    reserved_bytes = torch.cuda.memory_reserved()
    arena.resize(count * UNIT_BYTES)
    other = run(place(0, count), anywhere(12))
    more_bytes = torch.cuda.memory_reserved() - reserved_bytes
    assert more_bytes == pytest.approx((count - 40) * UNIT_BYTES, abs=2 * 2**20)
    assert (result == 2).all()
    assert arena.num_unplaced == 0
    del other


def test_a_step_runs_without_planned_offsets_if_two_arenas_do_not_fit(arena):
    with arena.segment(SegmentOpenings([[place(0, 5)]])), arena.allocating():
        arena.open_next()
        left = [tensor(5)]
    total_bytes = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 30 * UNIT_BYTES) / total_bytes)
    try:
        arena.resize(50 * UNIT_BYTES)
        for num_unplaced in (1, 1):
            with arena.segment(SegmentOpenings([[place(0, 5)], [place(10, 20)]])), arena.allocating():
                arena.open_next()
                tensor(5)
                arena.open_next()
                tensor(20)
            assert arena.num_unplaced == num_unplaced
            left.clear()
            arena.begin_step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_arena_is_freed_when_the_last_result_in_it_has_died(arena):
    torch.cuda.empty_cache()
    with arena.segment(SegmentOpenings([[place(0, 5)]])), arena.allocating():
        arena.open_next()
        left = tensor(5)
    before = torch.cuda.memory_reserved()
    arena.resize(80 * UNIT_BYTES)
    arena.begin_step()
    assert torch.cuda.memory_reserved() == before
    del left
    arena.begin_step()
    assert torch.cuda.memory_reserved() <= before - 40 * UNIT_BYTES
