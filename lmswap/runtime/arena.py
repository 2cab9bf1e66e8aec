"""Steers torch's caching allocator to planned offsets: one arena per model on a GPU.

The arena is one segment of a private pool. The allocator returns the smallest free block that is large enough, so all
of the arena that no tensor holds is held here: just before an op or a swap-in allocates, exactly the planned extents of
its tensors are freed, and each tensor gets one that it fits; freed memory is taken back at the next opening.

Outputs and gradients of a step are allocated outside the arena, in other segments of the pool: the caller may keep them
for any time. So the arena is empty between steps, and is reallocated when another plan needs another size. An arena
that still holds a tensor would stay allocated until that dies, in addition to the new one.

Tensors cannot overlap: all blocks are the allocator's own. If an extent is occupied when it is needed, because the
caller kept a tensor longer than planned, everything held is freed and the allocator places the rest of the segment as
it does without a plan (counted in `num_unplaced`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lmswap.ir.arena_layout import SMALL_BYTES, Slot
from lmswap.runtime import _C
from lmswap.runtime.arena_blocks import Extent, Moves, Occupied, extent_to_free, holding_moves, within
from lmswap.runtime.streams import current_stream_of
from lmswap.torch_compat.caching_allocator import memory_stats, pool_segments, raw_functions

_log = logging.getLogger(__name__)

_Segment = dict[str, Any]  # of torch's allocator, as its snapshot describes it
# What determines the offsets of a segment's tensors: whether its results are accumulated, and the free extents.
_StartState = tuple[bool, tuple[Extent, ...]]
# Results of the last step are in an old pool until the next step, or the one after it, has its own.
_MAX_FREES = 3
# A segment begins with other free extents where the caller holds other results of the previous step; this many are
# cached.
_MAX_START_STATES = 16


@dataclass
class SegmentOpenings:
    """The openings of one segment's run, in order: the extents to be free for the allocations that follow."""

    openings: Sequence[Sequence[Slot]]
    arena_bytes: int = 0  # of the arena that they are planned in; 0: of any
    known: dict[_StartState, list[Moves]] = field(default_factory=dict)


_ANYWHERE = nullcontext()
_NOT_PLACED = nullcontext(lambda: _ANYWHERE)

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def unused_arena_bytes(device: torch.device) -> int:
    """Return the bytes held by arenas of ``device`` and by no tensor, which torch counts as allocated."""
    return sum(sum(arena._holds.held().values()) for arena in _arenas if arena.device == device)


def placing(
    arena: Arena | None, script: SegmentOpenings | None, *, adds_up: bool = False
) -> AbstractContextManager[Callable[[], AbstractContextManager[None]]]:
    """Run a segment with planned offsets.

    Args:
        arena: None where tensors have no planned offsets.
        script: the segment's openings; None if it has none.
        adds_up: see `Arena.segment`.

    Yields:
        A function that returns the context for each part of the segment.
    """
    return _NOT_PLACED if arena is None or script is None else _placing(arena, script, adds_up)


@contextmanager
def _placing(
    arena: Arena, script: SegmentOpenings, adds_up: bool
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    with arena.segment(script, adds_up=adds_up):
        yield arena.allocating


class _NoExtentOutside(Exception):
    """No free extent outside the arena is large enough for a result."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Arena:
    """Device memory in which the tensors of a step get their planned offsets."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is a GPU; nothing is allocated before `resize` and the first segment."""
        self.device = device
        self._process = os.getpid()
        self._current_stream = current_stream_of(device)
        self.nbytes = self._min_bytes = 0
        self._has_grown = False  # the pool has grown beyond the plan, as the allocator placed tensors
        self._pool: torch.cuda.MemPool | None = None
        self._stream = self._base = 0
        self._inside = range(0)  # addresses of its segment
        # Blocks that no tensor holds.
        self._holds = _C.Holds(*raw_functions())
        self._num_frees_left = 0  # steps at whose beginning an old arena may still be freed
        self._is_open = False  # while a segment runs
        self._script: SegmentOpenings | None = None  # of the running segment; None if the allocator chooses
        self._moves: list[Moves] = []
        self._next = 0
        self._start_state: _StartState = False, ()
        self.num_unplaced = 0  # runs of segments in which a place was not free
        self.num_computed = 0  # openings computed, which takes the host half a millisecond each
        _arenas.add(self)

    @property
    def reserved_bytes(self) -> int:
        """Device bytes reserved for the arena, results and small tensors."""
        return sum(int(segment["total_size"]) for segment in self._segments())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of these that tensors hold; valid while no segment runs."""
        return sum(int(segment["allocated_size"]) for segment in self._segments())

    def num_segments_freed(self) -> int:
        """Return the number of segments that torch has freed so far, in all pools."""
        return int(memory_stats(self.device.index or 0)["segment"]["all"]["freed"])

    def resize(self, nbytes: int) -> None:
        """Set the least size of the arena in bytes, whatever scripts need; effective as soon as the arena is empty."""
        self._min_bytes = nbytes
        if nbytes > self.nbytes or not self._base:
            self._reallocate()

    def close(self) -> None:
        """Free the arena once the last tensor in it has died; it has no bytes until `resize`. Idempotent.

        A forked child leaves it to its parent: it has no device, and destroying a pool frees device memory.
        """
        self.nbytes = 0
        if self._pool is not None:
            is_child = os.getpid() != self._process
            self._num_frees_left = _MAX_FREES
            if is_child:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))
            self._pool, self._base = None, 0
            if not is_child:
                torch.cuda.empty_cache()

    def release_if_empty(self) -> None:
        """Free the memory until the next segment, if the arena is empty."""
        if self._base and not self._is_open and self._is_empty():
            self._reallocate()

    def begin_step(self) -> None:
        """Begin a step on the current stream; an arena of another stream is reallocated, which could not serve it."""
        if self._num_frees_left:
            self._num_frees_left -= 1
            torch.cuda.empty_cache()
        if self._base and self._current_stream() != self._stream:
            self._reallocate()

    def _reallocate(self) -> None:
        self.close()
        self.nbytes, self._has_grown = self._min_bytes, False

    def _fit(self, script: SegmentOpenings) -> None:
        """Reallocate an empty arena if its size is to change."""
        nbytes = max(script.arena_bytes, self._min_bytes)
        if self._base and (self.nbytes != nbytes or self._has_grown) and self._is_empty():
            self._reallocate()
        if not self._base:
            self.nbytes = nbytes

    def _is_empty(self) -> bool:
        (own,) = (segment for segment in self._segments() if segment["address"] == self._base)
        return not own["allocated_size"]

    @contextmanager
    def segment(self, script: SegmentOpenings, *, adds_up: bool = False) -> Iterator[None]:
        """Run a segment; what it allocates within `allocating` gets its planned offsets while these are free.

        On another stream than the step's first segment the allocator chooses; so it does from the first planned extent
        on that is occupied, which `num_unplaced` counts.

        Args:
            script: the openings of this run; computed moves are cached in it.
            adds_up: results returned before the end are accumulated into others and free again; else they stay
                allocated.
        """
        stream = self._current_stream()
        if not self.nbytes or (self._base and stream != self._stream):
            yield
            return
        self._stream = stream
        self._fit(script)
        try:
            with self._pooled():
                self._begin(script, adds_up)
            self._is_open = True
            yield
        finally:
            self._is_open = False
            self._free_held()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Run a part of the segment: allocations of this thread go to the arena."""
        if not (self._is_open and self._base):
            yield
            return
        with self._pooled():
            yield

    @contextmanager
    def _pooled(self) -> Iterator[None]:
        with torch.cuda.device(self.device):  # determines the device of pools and blocks
            if self._pool is None:
                self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                yield

    def open_next(self) -> None:
        """Free the planned extents of the next allocations; to be called just before them, in the script's order."""
        if self._script is None:
            return
        try:
            if self._next < len(self._moves):
                self._execute(self._moves[self._next])
            else:
                self._moves.append(self._open(self._script.openings[self._next]))
        except (Occupied, torch.OutOfMemoryError) as error:
            self._script.known.pop(self._start_state, None)
            self._fall_back(error)
        self._next += 1

    def _begin(self, script: SegmentOpenings, adds_up: bool) -> None:
        try:
            if not self._base:
                self._base = self._holds.take(self.nbytes, self._stream)
                self._inside = self._segment_of(self._base)
                self._holds.give_all()
            self._script, self._next = script, 0
            start_state = self._start_state = adds_up, tuple(self._free())
            self._execute(holding_moves(start_state[1]))
        except (Occupied, torch.OutOfMemoryError) as error:  # an old arena may still be held
            self._fall_back(error)
            return
        if start_state not in script.known and len(script.known) >= _MAX_START_STATES:
            script.known.clear()
        self._moves = script.known.setdefault(start_state, [])

    def _fall_back(self, error: Exception) -> None:
        _log.info("this segment continues without planned offsets: %s", error)
        self.num_unplaced += 1
        self._has_grown = True
        self._free_held()

    def _free_held(self) -> None:
        self._holds.give_all()
        self._script = None

    def _open(self, slots: Sequence[Slot]) -> Moves:
        """Open ``slots``, close all other free extents, and return the moves; adds memory for results where needed."""
        self.num_computed += 1
        closing = holding_moves(self._free())
        self._execute(closing)
        while True:
            try:
                opening = self._opening_moves(slots)
                break
            except _NoExtentOutside as missing:
                assert self._script is not None
                self._script.known.pop(self._start_state, None)  # the next run begins with the memory added here
                self._holds.take(missing.nbytes, self._stream)
                self._execute(holding_moves(self._free()))  # the remainder of its segment
        self._execute(opening)
        return (*closing, *opening)

    def _opening_moves(self, slots: Sequence[Slot]) -> Moves:
        """Return the moves that open ``slots`` when all free memory that can be held is held."""
        closed, loose = self._holds.held(), dict(self._free())
        moves, opened = list[tuple[int, int]](), list[tuple[int, int]]()
        for slot in slots:
            if slot.offset is not None:
                start, segment = self._base + slot.offset, self._inside
            else:
                start = self._find_outside(slot.nbytes, closed, opened)
                segment = self._segment_of(start)
            stop = start + slot.nbytes
            low, high = extent_to_free(start, stop, within(segment, closed), within(segment, loose))
            moves += [(0, address) for address in closed if low <= address < high]
            for pieces in (closed, loose):
                for address in [address for address in pieces if low <= address < high]:
                    del pieces[address]
            # A remainder too small to be held goes to the tensor that takes the place.
            start, stop = (low if start - low <= SMALL_BYTES else start), (high if high - stop <= SMALL_BYTES else stop)
            cut = [(begin, end) for begin, end in pairwise((low, start, stop, high)) if end > begin]
            moves += [(end - begin, begin) for begin, end in cut]
            closed.update({begin: end - begin for begin, end in cut if begin != start})
            opened.append((start, stop))
        return (*moves, *((0, address) for address, _ in opened))

    def _find_outside(self, nbytes: int, closed: Mapping[int, int], opened: Sequence[Extent]) -> int:
        """Return the address for a result: the smallest of ``closed`` that is large enough.

        It must not touch an extent ``opened`` with it: the allocator would merge the two.
        """
        ends = {end for extent in opened for end in extent}

        def is_apart(address: int) -> bool:
            return ends.isdisjoint((address, address + nbytes))

        outside = ((size, address) for address, size in closed.items() if address not in self._inside)
        fitting = [(size, address) for size, address in outside if size >= nbytes and is_apart(address)]
        if not fitting:
            raise _NoExtentOutside(nbytes)
        return min(fitting)[1]

    def _segment_of(self, address: int) -> range:
        ranges = (range(segment["address"], segment["address"] + segment["total_size"]) for segment in self._segments())
        return next(addresses for addresses in ranges if address in addresses)

    def _execute(self, moves: Moves) -> None:
        if (failed := self._holds.make(moves, self._stream)) is None:
            return
        nbytes, address, found = failed
        if not nbytes:
            raise Occupied(f"the block to free at offset {address - self._base} is not held")
        raise Occupied(f"{nbytes} bytes were allocated at offset {found - self._base}, not {address - self._base}")

    def _free(self) -> list[Extent]:
        """Return the extents, inside and outside the arena, that neither tensors nor this object hold, by address."""
        large = (segment for segment in self._segments() if segment["segment_type"] == "large")
        blocks = (block for segment in large for block in segment["blocks"] if block["state"] == "inactive")
        return sorted((int(block["address"]), int(block["size"])) for block in blocks)

    def _segments(self) -> list[_Segment]:
        if self._pool is None:
            return []
        return pool_segments(self._pool.id)
