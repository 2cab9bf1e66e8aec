"""A faster plan of a tiny step, if there is one, by going through all plans with rules, memory and time of its own.

Recomputes come first: for each list of them, positions of all copies of the resulting schedule follow. Three kinds of
plans are skipped, as another is no slower: with a recompute that nothing reads, with a release before memory is needed,
and with a trip that frees memory only where enough is free.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from lmswap.analyze.repeatable import repeatable_ops
from lmswap.ir.machine import Host, Link, Machine
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.schedule import schedule
from lmswap.planner import simulate, verify
from tests.ir.build import Step

_ENDLESS = (BufferKind.OUTPUT, BufferKind.GRADIENT)
_OWN = (BufferKind.PARAMETER, BufferKind.INPUT)


def faster_plan(
    step: Step,
    machine: Machine,
    budget_bytes: int,
    than_seconds: float,
    *,
    min_swap_bytes: int = 1,
    max_recomputes: int = 2,
) -> Plan | None:
    """A plan of at most ``max_recomputes`` that takes less than ``than_seconds``, verified and simulated."""
    for recomputes in _recompute_lists(step, than_seconds, max_recomputes):
        search = _Trips(step, machine, budget_bytes, than_seconds, recomputes=recomputes, min_swap_bytes=min_swap_bytes)
        for swaps, seconds in search.faster():
            plan = Plan("all", budget_bytes, swaps, seconds, 0, {"host": 2**40}, recomputes=recomputes)
            timeline = simulate(step.program, step.costs, machine, plan)
            assert timeline.seconds == pytest.approx(seconds)
            plan = replace(plan, predicted_peak_bytes=timeline.peak_bytes, tier_bytes={"host": 2**20})
            verify(step.program, step.costs, machine, plan)
            return plan
    return None


def _recompute_lists(step: Step, than_seconds: float, most: int) -> Iterator[tuple[Recompute, ...]]:
    program, seconds = step.program, step.costs.seconds
    allowed = [
        Recompute(op.index, position)
        for position in range(len(program.ops))
        for op, is_repeatable in zip(program.ops[:position], repeatable_ops(program), strict=False)
        if is_repeatable and program.segment_of(op.index).can_pass_values_to(program.segment_of(position))
    ]
    spare = than_seconds - sum(seconds)
    for count in range(most + 1):
        for chosen in itertools.product(allowed, repeat=count):
            in_order = all(a.position <= b.position for a, b in itertools.pairwise(chosen))
            if in_order and sum(seconds[recompute.op] for recompute in chosen) < spare:
                yield chosen


@dataclass(eq=False)
class _Trip:
    """A gap of a buffer, and where its trip is: positions are None until they are reached."""

    buffer: int
    nbytes: int
    written: int
    after: int
    before: int
    out_from: int
    out_until: int
    release_until: int
    in_from: int
    reuses: tuple[int, ...]  # trips whose host copies, where they are made, serve for this one as well
    out: int | None = None
    release: int | None = None
    back: int | None = None
    end: float = 0.0  # of the copy queued last


@dataclass
class _Clocks:
    compute: float = 0.0
    out: float = 0.0
    into: float = 0.0
    queued: float = 0.0


class _Trips:
    """All positions of copies of one schedule."""

    def __init__(
        self,
        step: Step,
        machine: Machine,
        budget_bytes: int,
        than_seconds: float,
        *,
        recomputes: tuple[Recompute, ...],
        min_swap_bytes: int,
    ) -> None:
        runs = schedule(step.program, recomputes)
        self._program: Program = runs.program
        self._seconds = runs.costs(step.costs).seconds
        self._left = [*itertools.accumulate(reversed(self._seconds), initial=0.0)][::-1]
        self._budget_bytes, self._than = budget_bytes, than_seconds
        self._link: Link = machine.tier("host").link.while_busy
        self._host = machine.host or Host(0.0, 0.0)
        self._is_useful = self._reads_every_recompute(runs.ops)
        self._present = list(runs.costs(step.costs).scratch_bytes)
        self._trips: list[_Trip] = []
        for buffer in self._program.buffers:
            uses = [op.index for op in self._program.ops if buffer.id in (*op.reads, *op.writes)]
            if uses and buffer.kind not in _OWN:
                self._add(buffer.id, uses, is_swappable=buffer.nbytes >= max(min_swap_bytes, 1))

    def _reads_every_recompute(self, origins: tuple[int, ...]) -> bool:
        ops, seen = self._program.ops, set[int]()
        for op, origin in zip(ops, origins, strict=True):
            later = {buffer for other in ops[op.index + 1 :] for buffer in other.reads}
            if origin in seen and not later.intersection(op.writes):
                return False
            seen.add(origin)
        return True

    def _add(self, buffer: int, uses: list[int], *, is_swappable: bool) -> None:
        program, kind = self._program, self._program.buffers[buffer].kind
        start, stop = uses[0], uses[-1] + 1
        if kind is BufferKind.TANGENT:
            start, stop = program.segment_of(start).start, program.segment_of(uses[-1]).stop
        elif kind in _ENDLESS:
            stop = len(program.ops)
        nbytes = program.buffers[buffer].nbytes
        for op in range(start, stop):
            self._present[op] += nbytes
        if kind is not BufferKind.ACTIVATION or not is_swappable:
            return
        for after, before in itertools.pairwise(uses):
            origin, destination = program.segment_of(after), program.segment_of(before)
            if before == after + 1 or not origin.can_pass_values_to(destination):
                continue
            written = max(op for op in range(after + 1) if buffer in program.ops[op].writes)
            same = [n for n, trip in enumerate(self._trips) if (trip.buffer, trip.written) == (buffer, written)]
            is_direct = origin != destination and origin.stop == destination.start
            trip = _Trip(
                buffer,
                nbytes,
                written,
                after,
                before,
                max(written + 1, origin.start),
                min(before - 1, origin.stop),
                before - 1 if origin == destination or is_direct else origin.stop,
                destination.start,
                tuple(n for n in same if program.segment_of(self._trips[n].before) == origin),
            )
            self._trips.append(trip)

    def faster(self) -> Iterator[tuple[tuple[Swap, ...], float]]:
        if not self._is_useful:
            return
        for position in range(len(self._program.ops)):
            away = sum(trip.nbytes for trip in self._trips if trip.after < position < trip.before)
            if self._present[position] - away > self._budget_bytes:
                return
        yield from self._from(0, self._trips, _Clocks())

    def _from(self, at: int, trips: list[_Trip], clocks: _Clocks) -> Iterator[tuple[tuple[Swap, ...], float]]:
        if clocks.compute + self._left[at] >= self._than:
            return
        if at == len(self._seconds):
            yield self._swaps(trips), clocks.compute
            return
        can_leave = [n for n, trip in enumerate(trips) if self._can_leave(trips, trip, at)]
        for outs in _subsets(can_leave):
            for order in _by_need(trips, outs):
                changed, later = list(trips), replace(clocks)
                for n in order:
                    changed[n] = replace(trips[n], out=at, end=self._copy(later, trips[n].nbytes, is_in=False))
                yield from self._release(at, changed, later)

    def _release(self, at: int, trips: list[_Trip], clocks: _Clocks) -> Iterator[tuple[tuple[Swap, ...], float]]:
        can_go = [n for n, trip in enumerate(trips) if self._can_go(trips, trip, at)]
        can_return = [
            n for n, trip in enumerate(trips) if trip.release is not None and trip.back is None and at >= trip.in_from
        ]
        for released in _subsets(can_go):
            gone, waited = list(trips), replace(clocks)
            for n in released:
                waited.compute = max(waited.compute, trips[n].end if trips[n].out is not None else 0.0)
                gone[n] = replace(trips[n], release=at)
            for returned in _subsets(can_return):
                for order in _by_need(gone, returned):
                    back, later = list(gone), replace(waited)
                    for n in order:
                        back[n] = replace(gone[n], back=at, end=self._copy(later, gone[n].nbytes, is_in=True))
                    yield from self._run(at, back, later, released)

    def _run(
        self, at: int, trips: list[_Trip], clocks: _Clocks, released: tuple[int, ...]
    ) -> Iterator[tuple[tuple[Swap, ...], float]]:
        is_away = [trip.release is not None and trip.back is None for trip in trips]
        resident = self._present[at] - sum(trip.nbytes for trip, away in zip(trips, is_away, strict=True) if away)
        if resident > self._budget_bytes:
            return
        for n in released:
            if resident + trips[n].nbytes <= self._budget_bytes and at < min(
                trips[n].release_until, trips[n].before - 1
            ):
                return
        for trip in trips:
            if trip.before == at:
                if (trip.out is not None or trip.release is not None) and trip.back is None:
                    return
                clocks.compute = max(clocks.compute, trip.end)
        clocks.queued += self._host.op_seconds
        clocks.compute = self._end(clocks, max(clocks.compute, clocks.queued), self._seconds[at])
        yield from self._from(at + 1, trips, clocks)

    def _can_leave(self, trips: list[_Trip], trip: _Trip, at: int) -> bool:
        is_in_time = trip.out is None and trip.release is None and trip.out_from <= at <= trip.out_until
        return is_in_time and not self._overlaps(trips, trip, at)

    def _can_go(self, trips: list[_Trip], trip: _Trip, at: int) -> bool:
        has_copy = trip.out is not None or any(trips[n].back is not None for n in trip.reuses)
        is_in_time = trip.release is None and trip.after < at <= trip.release_until
        return has_copy and is_in_time and not self._overlaps(trips, trip, at)

    @staticmethod
    def _overlaps(trips: list[_Trip], trip: _Trip, at: int) -> bool:
        """Whether another trip of the buffer is under way."""
        others = [other for other in trips if other.buffer == trip.buffer and other.after != trip.after]
        return any((other.out is not None or other.release is not None) and other.before >= at for other in others)

    def _copy(self, clocks: _Clocks, nbytes: int, *, is_in: bool) -> float:
        clocks.queued += self._host.copy_seconds
        clocks.compute = max(clocks.compute, clocks.queued)
        seconds = (self._link.in_rate if is_in else self._link.out_rate).seconds(nbytes)
        own, other = (clocks.into, clocks.out) if is_in else (clocks.out, clocks.into)
        start = max(own, clocks.compute)
        end = _slowed(start, seconds, other, max(0.0, 2 * self._link.both_factor - 1))
        if is_in:
            clocks.into = end
        else:
            clocks.out = end
        return end

    def _end(self, clocks: _Clocks, start: float, seconds: float) -> float:
        return _slowed(start, seconds, max(clocks.out, clocks.into), self._link.compute_factor)

    def _swaps(self, trips: list[_Trip]) -> tuple[Swap, ...]:
        order = sorted((t for t in trips if t.back is not None), key=lambda t: t.before)
        offsets = {trip.buffer: 8192 * n for n, trip in enumerate(order)}
        return tuple(
            Swap(t.buffer, "host", offsets[t.buffer], t.out, t.release or 0, t.back or 0, t.before) for t in order
        )


def _slowed(start: float, seconds: float, busy_until: float, share: float) -> float:
    """The end of work that runs at ``share`` of its speed until ``busy_until``."""
    if start >= busy_until:
        return start + seconds
    done = (busy_until - start) * share
    return start + seconds / share if seconds < done else busy_until + (seconds - done)


def _subsets(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(numbers) + 1):
        yield from itertools.combinations(numbers, count)


def _by_need(trips: list[_Trip], numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The orders in which a plan can list ``numbers``: by need."""
    yield tuple(sorted(numbers, key=lambda n: trips[n].before))
