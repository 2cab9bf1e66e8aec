"""How does torch's caching allocator come to put tensors at planned places? One arena per model on a GPU.

The allocator takes the smallest free block that is large enough. So the arena, one segment of a pool of its own, is
handed out in full: what no tensor holds is held here. Just before an op or a copy in allocates, exactly the places of
its tensors are let go of, and each tensor finds one that it fits; what dies later is taken back at the next opening.

What a step hands over lies beside the arena, in other segments of the pool: the caller may hold it for as long as it
likes. So nothing lies in the arena between steps, and when another plan needs another size it is made anew. An arena in
which something does lie would stay until that has died, beside the new one.

Nothing here can make two tensors share memory: all blocks are the allocator's own. If a place is not free when it is
needed, because the caller kept a tensor for longer than planned, all is let go of and the allocator places the rest of
the segment as it does without a plan.
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

from lmswap.execute import _C
from lmswap.execute.blocks import Extent, Moves, Taken, run_around, takes, within
from lmswap.execute.streams import current_stream_of
from lmswap.ir.arena_layout import SMALL_BYTES, Slot

_log = logging.getLogger(__name__)

_Segment = dict[str, Any]  # of torch's allocator, as it describes it
# What decides where a segment's tensors come to lie: whether its results are added to others, and what is free.
_Beginning = tuple[bool, tuple[Extent, ...]]
# Results of the last step are in an old pool until the next one has its own, or a step longer.
_LEAVING = 3
# Segments begin with other free blocks where the caller holds other results of the step before; more kinds of
# beginnings than this are not remembered.
_MOST_BEGINNINGS = 16


@dataclass
class Script:
    """The openings of one segment's run, in order: the places that are free for what is allocated next."""

    openings: Sequence[Sequence[Slot]]
    arena_bytes: int = 0  # in which they lie; 0: in any
    known: dict[_Beginning, list[Moves]] = field(default_factory=dict)


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def held_bytes(device: torch.device) -> int:
    """What arenas of ``device`` hold now and no tensor does, though torch counts it as allocated."""
    return sum(sum(arena._holds.held().values()) for arena in _arenas if arena.device == device)


@contextmanager
def placing(
    arena: Arena | None, script: Script | None, *, adds_up: bool = False
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A segment runs, and each of its parts in the context that is given; without places anywhere.

    See `Arena.segment` for ``adds_up``.
    """
    if arena is None or script is None:
        yield nullcontext
        return
    with arena.segment(script, adds_up=adds_up):
        yield arena.allocating


class _NoRoom(Exception):
    """Nothing beside the arena is large enough for a result."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Arena:
    """Device memory in which the tensors of a step lie where they were planned to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process = os.getpid()
        self._current_stream = current_stream_of(device)
        self.nbytes = self._least_bytes = 0
        self._is_spoiled = False  # the pool has more than it was planned to, as the allocator placed tensors by itself
        self._pool: torch.cuda.MemPool | None = None
        self._stream = self._base = 0
        self._inside = range(0)  # addresses of its segment
        # What no tensor holds.
        self._holds = _C.Holds(
            torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
        )
        self._num_leaving = 0  # steps at whose beginning an old arena may still be given back
        self._is_open = False  # a segment runs
        self._script: Script | None = None  # of the segment that runs; None if it lets the allocator choose
        self._moves: list[Moves] = []
        self._next = 0
        self._beginning: _Beginning = False, ()
        self.num_unplaced = 0  # runs of segments in which a place was not free
        self.num_found_out = 0  # openings that were worked out, which takes the host half a millisecond each
        _arenas.add(self)

    @property
    def reserved_bytes(self) -> int:
        """What the arena, results and small tensors take of the device."""
        return sum(int(segment["total_size"]) for segment in self._segments())

    @property
    def tensor_bytes(self) -> int:
        """What tensors hold of that, as long as no segment runs."""
        return sum(int(segment["allocated_size"]) for segment in self._segments())

    def num_given_back(self) -> int:
        """How many segments torch has given back to the device by now, its own included."""
        return int(torch._C._cuda_memoryStats(self.device.index or 0)["segment"]["all"]["freed"])

    def resize(self, nbytes: int) -> None:
        """From the next segment on the arena has ``nbytes``, or what its script needs, as soon as nothing is in it."""
        self._least_bytes = nbytes
        if nbytes > self.nbytes or not self._base:
            self._make_anew()

    def close(self) -> None:
        """Gives the arena back, when the last tensor in it has died, and has no bytes until `resize`. Idempotent.

        A forked child leaves it to its parent: it has no device, and a pool that is destroyed gives memory back to it.
        """
        self.nbytes = 0
        if self._pool is not None:
            is_child = os.getpid() != self._process
            self._num_leaving = _LEAVING
            if is_child:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))
            self._pool, self._base = None, 0
            if not is_child:
                torch.cuda.empty_cache()

    def rest(self) -> None:
        """Leaves its memory to something else until the next segment, if nothing lies in it."""
        if self._base and not self._is_open and self._is_empty():
            self._make_anew()

    def begin_step(self) -> None:
        """A step begins on the current stream: of another one's arena the allocator would give it nothing."""
        if self._num_leaving:
            self._num_leaving -= 1
            torch.cuda.empty_cache()
        if self._base and self._current_stream() != self._stream:
            self._make_anew()

    def _make_anew(self) -> None:
        self.close()
        self.nbytes, self._is_spoiled = self._least_bytes, False

    def _fit(self, script: Script) -> None:
        """Makes the arena anew if it is to be another, and nothing lies in it."""
        nbytes = max(script.arena_bytes, self._least_bytes)
        if self._base and (self.nbytes != nbytes or self._is_spoiled) and self._is_empty():
            self._make_anew()
        if not self._base:
            self.nbytes = nbytes

    def _is_empty(self) -> bool:
        (own,) = (segment for segment in self._segments() if segment["address"] == self._base)
        return not own["allocated_size"]

    @contextmanager
    def segment(self, script: Script, *, adds_up: bool = False) -> Iterator[None]:
        """A segment runs; what it allocates within `allocating` goes to its places as long as these are free.

        On another stream than the step's first segment it has none. Results that are handed over in its midst stay
        there, or, with ``adds_up``, are added to others and free again.
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
            self._let_go()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """A part of the segment runs: allocations of this thread go to the arena."""
        if not (self._is_open and self._base):
            yield
            return
        with self._pooled():
            yield

    @contextmanager
    def _pooled(self) -> Iterator[None]:
        with torch.cuda.device(self.device):  # of which pools and blocks are made
            if self._pool is None:
                self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                yield

    def advance(self) -> None:
        """The next allocations are about to be made."""
        if self._script is None:
            return
        try:
            if self._next < len(self._moves):
                self._make(self._moves[self._next])
            else:
                self._moves.append(self._find_out(self._script.openings[self._next]))
        except (Taken, torch.OutOfMemoryError) as error:
            self._script.known.pop(self._beginning, None)
            self._give_up(error)
        self._next += 1

    def _begin(self, script: Script, adds_up: bool) -> None:
        try:
            if not self._base:
                self._base = self._holds.take(self.nbytes, self._stream)
                self._inside = self._segment_of(self._base)
                self._holds.give_all()
            self._script, self._next = script, 0
            beginning = self._beginning = adds_up, tuple(self._free())
            self._make(takes(beginning[1]))
        except (Taken, torch.OutOfMemoryError) as error:  # where something still holds an old arena there is no room
            self._give_up(error)
            return
        if beginning not in script.known and len(script.known) >= _MOST_BEGINNINGS:
            script.known.clear()
        self._moves = script.known.setdefault(beginning, [])

    def _give_up(self, error: Exception) -> None:
        _log.info("the allocator places the rest of this segment: %s", error)
        self.num_unplaced += 1
        self._is_spoiled = True
        self._let_go()

    def _let_go(self) -> None:
        self._holds.give_all()
        self._script = None

    def _find_out(self, places: Sequence[Slot]) -> Moves:
        """Opens ``places`` and closes all else that is free; what that takes where memory beside the arena suffices."""
        self.num_found_out += 1
        closing = takes(self._free())
        self._make(closing)
        while True:
            try:
                opening = self._work_out(places)
                break
            except _NoRoom as missing:
                assert self._script is not None
                self._script.known.pop(self._beginning, None)  # the next run begins with what is taken now
                self._holds.take(missing.nbytes, self._stream)
                self._make(takes(self._free()))  # what is left of its segment
        self._make(opening)
        return (*closing, *opening)

    def _work_out(self, places: Sequence[Slot]) -> Moves:
        """What opens ``places`` when all that is free and can be held is held."""
        closed, loose = self._holds.held(), dict(self._free())
        moves, opened = list[tuple[int, int]](), list[tuple[int, int]]()
        for place in places:
            if place.offset is not None:
                start, segment = self._base + place.offset, self._inside
            else:
                start = self._room_beside(place.nbytes, closed, opened)
                segment = self._segment_of(start)
            stop = start + place.nbytes
            low, high = run_around(start, stop, within(segment, closed), within(segment, loose))
            moves += [(0, address) for address in closed if low <= address < high]
            for pieces in (closed, loose):
                for address in [address for address in pieces if low <= address < high]:
                    del pieces[address]
            # Whoever takes the place has a rest, too, that is too small to be held.
            start, stop = (low if start - low <= SMALL_BYTES else start), (high if high - stop <= SMALL_BYTES else stop)
            cut = [(begin, end) for begin, end in pairwise((low, start, stop, high)) if end > begin]
            moves += [(end - begin, begin) for begin, end in cut]
            closed.update({begin: end - begin for begin, end in cut if begin != start})
            opened.append((start, stop))
        return (*moves, *((0, address) for address, _ in opened))

    def _room_beside(self, nbytes: int, closed: Mapping[int, int], opened: Sequence[Extent]) -> int:
        """Where a result is to begin: in the smallest of ``closed`` that is large enough.

        It touches nothing that is ``opened`` with it, from where to where: the two would be one to the allocator.
        """
        ends = {end for extent in opened for end in extent}

        def is_apart(address: int) -> bool:
            return ends.isdisjoint((address, address + nbytes))

        beside = ((size, address) for address, size in closed.items() if address not in self._inside)
        fitting = [(size, address) for size, address in beside if size >= nbytes and is_apart(address)]
        if not fitting:
            raise _NoRoom(nbytes)
        return min(fitting)[1]

    def _segment_of(self, address: int) -> range:
        ranges = (range(segment["address"], segment["address"] + segment["total_size"]) for segment in self._segments())
        return next(addresses for addresses in ranges if address in addresses)

    def _make(self, moves: Moves) -> None:
        if (failed := self._holds.make(moves, self._stream)) is None:
            return
        nbytes, address, found = failed
        if not nbytes:
            raise Taken(f"what is to be free at {address - self._base} is not held")
        raise Taken(f"{nbytes} bytes were free at {found - self._base} instead of {address - self._base}")

    def _free(self) -> list[Extent]:
        """What neither tensors nor this object hold of the arena and beside it, by address."""
        large = (segment for segment in self._segments() if segment["segment_type"] == "large")
        blocks = (block for segment in large for block in segment["blocks"] if block["state"] == "inactive")
        return sorted((int(block["address"]), int(block["size"])) for block in blocks)

    def _segments(self) -> list[_Segment]:
        if self._pool is None:
            return []
        # Of each number in what it is given torch gives up a reference that it does not own (2.11 to 2.13): those of
        # later pools than the 256th are objects of their own, and were freed twice, which ended processes later on.
        pool = self._pool.id
        for number in pool:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
        found: list[_Segment] = torch._C._cuda_memorySnapshot(pool)["segments"]
        return found
