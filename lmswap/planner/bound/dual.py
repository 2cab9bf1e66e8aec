"""The lower bound that given prices prove: the Lagrangian dual of planning, vectorized over buffers.

`lmswap.planner.bound.verify_certificate` states the bound and why it holds. A version of a persistent buffer lives from
one step into the next: the cuts of a cyclic step are followed by the step's end, and by those of the next one, at the
same prices.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lmswap.analyze.liveness import LiveRange
from lmswap.analyze.memory import Bytes, StepMemory
from lmswap.ir.machine import Link
from lmswap.ir.program import Program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True)
class IdleIntervals:
    """The gaps in which a buffer can be non-resident, with the seconds of each way to restore it; infinite if none.

    A version is a buffer since the op that wrote it last; gaps of one version are neighbours, in order of time.
    """

    after: Ints
    before: Ints
    written: Ints  # the op that made the version
    version: Ints  # an id
    nbytes: Floats
    out_seconds: Floats
    in_seconds: Floats
    recompute_seconds: Floats  # the buffer's share, by bytes, of a recompute

    def __getitem__(self, chosen: Bools) -> IdleIntervals:
        return IdleIntervals(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def idle_intervals(memory: StepMemory, link: Link, min_swap_bytes: int) -> IdleIntervals:
    """Every gap of the program in which a plan can have the buffer non-resident."""
    program, seconds = memory.program, memory.costs.seconds
    gaps = [
        (after, before, max((write for write in found.writes if write <= after), default=uses[0]), buffer)
        for buffer, found in memory.ranges.items()
        if program.buffers[buffer].is_swappable and program.buffers[buffer].nbytes
        for uses in (_uses_of_versions(program, found),)
        for after, before in pairwise(uses)
        if before > after + 1
    ]
    made_bytes: dict[int, int] = defaultdict(int)
    for made_by, made in {(written, buffer) for _, _, written, buffer in gaps}:
        made_bytes[made_by] += program.buffers[made].nbytes
    sizes = [program.buffers[buffer].nbytes for *_, buffer in gaps]
    copies = {
        size: (link.out_rate.seconds(size), link.in_rate.seconds(size)) if size >= min_swap_bytes else (np.inf, np.inf)
        for size in set(sizes)
    }
    recomputes = [
        seconds[made_by] * size / made_bytes[made_by]
        if memory.repeatable[made_by] and not program.buffers[buffer].is_persistent
        else np.inf
        for (_, _, made_by, buffer), size in zip(gaps, sizes, strict=True)
    ]
    is_never_written = np.array(
        [program.buffers[buffer].is_persistent and not memory.ranges[buffer].writes for *_, buffer in gaps], bool
    )
    after, before, written, buffer = np.array(gaps, np.int64).reshape(-1, 4).T
    version = buffer * (len(program.ops) + 1) + written
    out_seconds, in_seconds = np.array([copies[size] for size in sizes]).reshape(-1, 2).T
    # The host copy of what no op writes is valid for good.
    out_seconds = np.where(is_never_written & np.isfinite(out_seconds), 0.0, out_seconds)
    nbytes, recompute_seconds = np.array(sizes, np.float64), np.array(recomputes, np.float64)
    found = IdleIntervals(after, before, written, version, nbytes, out_seconds, in_seconds, recompute_seconds)
    return found[np.isfinite(np.minimum(out_seconds, recompute_seconds))]


def _uses_of_versions(program: Program, found: LiveRange) -> tuple[int, ...]:
    """The uses of a buffer; of a persistent one, from its first write, or use, to the same in the next step."""
    if not program.buffers[found.buffer].is_persistent or not found.uses:
        return found.uses
    first = found.uses.index(found.writes[0]) if found.writes else 0
    return (*found.uses[first:], *(use + len(program.ops) for use in found.uses[: first + 1]))


def min_resident_bytes(memory: StepMemory, found: IdleIntervals) -> Bytes:
    """By op: bytes that are resident under any plan, recomputes included."""
    num_ops = len(memory.curve)
    change = np.zeros(2 * num_ops + 1, np.int64)
    np.add.at(change, found.after + 1, found.nbytes.astype(np.int64))
    np.subtract.at(change, found.before, found.nbytes.astype(np.int64))
    idle = np.cumsum(change)[:-1]
    return memory.curve - idle[:num_ops] - idle[num_ops:]


@dataclass(frozen=True)
class BufferVersions:
    """Versions relative to cuts (ops, ascending) and the zones before, between and after them."""

    made_in: Ints  # zone
    is_idle: Bools  # [version, cut]: it can be non-resident there
    continues: Bools  # [version, cut]: the same gap covers the next cut
    nbytes: Floats
    out_seconds: Floats
    in_seconds: Floats
    recompute_seconds: Floats


def versions(found: IdleIntervals, cuts: Ints | Floats) -> BufferVersions:
    """The versions that are idle at one of ``cuts``, which are positions."""
    first, stop = np.searchsorted(cuts, found.after, "right"), np.searchsorted(cuts, found.before, "left")
    is_cut = first < stop
    gaps, first, counts = found[is_cut], first[is_cut], (stop - first)[is_cut]
    _, first_gap, row = np.unique(gaps.version, return_index=True, return_inverse=True)
    gap = np.repeat(np.arange(len(first)), counts)
    cut = np.arange(len(gap)) - np.repeat(np.cumsum(counts) - counts, counts) + first[gap]
    gap_at = np.full((len(first_gap), len(cuts) + 1), -1)
    gap_at[row[gap], cut] = gap
    is_idle = gap_at[:, :-1] >= 0
    made_in = np.searchsorted(cuts, gaps.written[first_gap], "right")
    costs = (gaps.nbytes, gaps.out_seconds, gaps.in_seconds, gaps.recompute_seconds)
    return BufferVersions(
        made_in, is_idle, is_idle & (gap_at[:, :-1] == gap_at[:, 1:]), *(each[first_gap] for each in costs)
    )


@dataclass(frozen=True)
class Prices:
    """Prices of memory at each cut in seconds per byte, and of each lane in each zone: see `lmswap.ir.certificate`."""

    memory: Floats
    out: Floats
    into: Floats


@dataclass(frozen=True)
class Dual:
    """The resources that plans share at some cuts and in the adjacent zones, and the versions that need them."""

    versions: BufferVersions
    idle_budget_bytes: Floats  # by cut: for idle versions, above `min_resident_bytes`
    cut_seconds: Floats  # of compute, by cut
    zone_seconds: Floats  # of compute, by zone
    link: Link
    is_cyclic: bool  # versions live through the cuts of two steps, and the end between them

    def bound(self, prices: Prices) -> float:
        """The seconds that ``prices`` prove."""
        at_cut = (np.minimum(lane[1:], lane[:-1]) for lane in (prices.out, prices.into))
        compute = self.zone_seconds @ self._run(prices.out, prices.into) + self.cut_seconds @ self._run(*at_cut)
        return float(compute - self.idle_budget_bytes @ prices.memory) + self._versions_seconds(prices)

    def by_cut(self, values: NDArray[_Number], at_end: NDArray[_Number]) -> NDArray[_Number]:
        """``values`` of the step's cuts, ``at_end`` that of its end, at the cuts that versions live through."""
        return np.concatenate([values, at_end, values]) if self.is_cyclic else values

    def by_zone(self, values: NDArray[_Number]) -> NDArray[_Number]:
        """``values`` of the step's zones in the zones that versions live through."""
        return np.append(values, values) if self.is_cyclic else values

    def _run(self, out: Floats, into: Floats) -> Floats:
        """The price of compute's time."""
        copying = np.maximum(out, into) + (self.link.both_rate - 1) * np.minimum(out, into)
        return np.minimum(1.0, (1 - copying) / self.link.compute_factor)

    def _versions_seconds(self, prices: Prices) -> float:
        """The least cost of all versions, by dynamic programming from the last zone backwards over their states.

        Each is resident in a zone, without or with a host copy, or non-resident at a cut, dropped or copied.
        """
        of, by_zone = self.versions, self.by_zone
        prices = Prices(self.by_cut(prices.memory, np.zeros(1)), by_zone(prices.out), by_zone(prices.into))
        run = self._run(prices.out, prices.into)
        resident, with_copy, dropped, copied, seconds = np.zeros((5, len(of.nbytes)))
        for cut in reversed(range(len(prices.memory))):
            idle, continues = of.is_idle[:, cut], of.continues[:, cut]
            dropped = np.minimum(
                np.where(continues, dropped, np.inf), _times_price(of.recompute_seconds, run[cut + 1]) + resident
            )
            copied = np.minimum(
                np.where(continues, copied, np.inf), _times_price(of.in_seconds, prices.into[cut + 1]) + with_copy
            )
            held = np.where(idle, of.nbytes * prices.memory[cut], 0.0)
            evicted = np.where(idle, dropped, np.inf)
            with_copy = np.minimum(np.minimum(with_copy + held, evicted), np.where(idle, copied, np.inf))
            resident = np.minimum(resident + held, evicted)
            resident = np.minimum(resident, _times_price(of.out_seconds, prices.out[cut]) + with_copy)
            seconds = np.where(of.made_in == cut, resident, seconds)
        return float(seconds.sum())


def _times_price(seconds: Floats, price: float) -> Floats:
    """``seconds`` times ``price``; infinite seconds cost infinitely much at a price of 0 too."""
    return seconds * price if price > 0 else np.where(np.isinf(seconds), np.inf, 0.0)


def dual(memory: StepMemory, found: IdleIntervals, cuts: Ints, budget_bytes: int, link: Link) -> Dual:
    """The `Dual` of the step at ``cuts``."""
    starts, is_cyclic, num_ops = np.array(memory.op_starts), memory.program.is_cyclic, len(memory.curve)
    return Dual(
        versions(found, np.concatenate([cuts, [num_ops - 0.5], cuts + num_ops]) if is_cyclic else cuts),
        (budget_bytes - min_resident_bytes(memory, found)[cuts]).astype(np.float64),
        starts[cuts + 1] - starts[cuts],
        starts[np.append(cuts, len(starts) - 1)] - starts[np.append(0, cuts + 1)],
        link,
        is_cyclic,
    )
