"""Independent verifier of certificates: shares no code with `certify` or the analysis.

Proof of the bound. Take any plan, and its state while the op of each cut runs for the first time. A version (a buffer
since the op that wrote it last) that is idle there is resident, or not: dropped, to be recomputed, or copied out before
that op began. Between two cuts, or a cut and its next use, it may be restored, by a recompute of the op that made it or
by a copy in that begins after the one op and ends before the other; it may be copied out, once for as long as nothing
is recomputed; and it must be resident where it is used. At a price λ for each byte at a cut, and α, β for the time of
the lanes out and in, it pays

    where it is resident and idle      λ · bytes
    for the copy out                   α · the copy's seconds
    for each copy in                   β · the copy's seconds
    for each recompute                 γ · its share, by bytes, of the seconds of the op

and at least the cheapest of all paths through the zones from where it is made. (A copy that takes several zones pays no
less than all of it in the cheapest.) At each cut the plan has at most the budget, less the bytes resident under any
plan. Of the time in a zone copies run in a part, y, and none runs in the rest, x: no lane is busy for more than y,
and computed work takes x + f · y at most, f the link's compute_factor. So with

    γ = min(1, (1 - α - β) / f)

α · out + β · in + γ · (compute + recomputes) ≤ (α + β + γ f) · y + γ · x ≤ x + y: the time of the zone pays for all
three, and

    seconds ≥ Σ_zones γ · compute in the zone + Σ versions' cheapest paths - Σ_cuts λ · room

where the op of a cut counts at the lower α and the lower β of the adjacent zones: a copy across it is in both.
A cyclic step is one of many with one plan. A version of a persistent buffer lives from its write, through the end of
the step, to the next write: its path is through the cuts and zones of two steps, which have the same prices. Between
them, where no copy is under way, it may be non-resident as at a cut at which memory costs nothing. What no op writes
has a host copy for good; it is present at its first use, and its path leads from there to the same use in the next
step.

Furthermore, no step ends before each op has run once and the host has queued it; the host is otherwise left out, as
waiting for it only makes plans slower.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lmswap.errors import PlanInvalid
from lmswap.ir.certificate import Certificate
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Link, Machine
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.verify import unguarded_buffers

_TOLERANCE = 1e-9


def verify_certificate(
    program: Program,
    costs: OpCosts,
    machine: Machine,
    certificate: Certificate,
    *,
    budget_bytes: int,
    tier: str,
    min_swap_bytes: int,
) -> None:
    """Checks ``certificate`` against the arguments of `certify`.

    Raises:
        PlanInvalid: it is malformed, or states more than it proves.
        OptionError: ``machine`` has no such tier.
    """
    link = machine.tier(tier).link.while_busy
    _check_shape(program, certificate, link)
    versions = [*_versions(program, costs, min_swap_bytes), *_persistent_versions(program, min_swap_bytes)]
    resident = [_min_resident_bytes(program, costs, versions, cut) for cut in certificate.cuts]
    if any(nbytes > budget_bytes for nbytes in resident):
        proven = math.inf
    else:
        rooms = [budget_bytes - nbytes for nbytes in resident]
        prices = _Prices(certificate.cuts, certificate.memory_prices, certificate.out_prices, certificate.in_prices)
        if program.is_cyclic:
            prices = _unrolled(prices, len(program.ops))
        least = math.fsum(_min_seconds(version, prices, link) for version in versions)
        offered = math.fsum(price * room for price, room in zip(certificate.memory_prices, rooms, strict=True))
        queued = machine.host.op_seconds * len(program.ops) if machine.host else 0.0
        proven = max(costs.free_seconds, queued, _compute_seconds(costs, certificate, link) + least - offered)
    if not certificate.seconds <= proven * (1 + _TOLERANCE):
        raise PlanInvalid("certificate", f"states {certificate.seconds} seconds, its prices prove {proven}")


@dataclass
class _BufferVersion:
    """A buffer from the op that writes it to the next that does; it may be non-resident in ``gaps``."""

    nbytes: int
    written: int
    is_swappable: bool
    recompute_seconds: float  # its share; infinite if it is not recomputable
    gaps: list[tuple[int, int]]  # the uses before and after
    has_copy: bool = False  # a valid host copy from the start


class _Prices(NamedTuple):
    cuts: tuple[float, ...]  # positions, in order
    memory: tuple[float, ...]
    out: tuple[float, ...]
    into: tuple[float, ...]


def _check_shape(program: Program, certificate: Certificate, link: Link) -> None:
    cuts, memory = certificate.cuts, certificate.memory_prices
    out, into = certificate.out_prices, certificate.in_prices
    if not len(cuts) == len(memory) == len(out) - 1 == len(into) - 1:
        raise PlanInvalid("certificate", f"{len(cuts)} cuts, prices of {len(memory)}, {len(out)} and {len(into)} zones")
    if list(cuts) != sorted(set(cuts)) or not all(0 <= cut < len(program.ops) for cut in cuts):
        raise PlanInvalid("certificate", f"cuts {cuts} are not ops in order")
    left = (1 - _copy_price(a, b, link) for a, b in zip(out, into, strict=True))
    for price in (*memory, *out, *into, *left):
        if not 0 <= price < math.inf:
            raise PlanInvalid("certificate", f"{price} is not a price")


def _versions(program: Program, costs: OpCosts, min_swap_bytes: int) -> list[_BufferVersion]:
    """All versions that can be non-resident."""
    last_use: dict[int, int] = {}
    last_write: dict[int, int] = {}
    gaps: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by buffer and op that wrote it
    for op in program.ops:
        for buffer in {*op.reads, *op.writes}:
            is_idle = last_use.get(buffer, op.index) < op.index - 1
            kept = program.buffers[buffer]
            if is_idle and kept.is_swappable and not kept.is_persistent and kept.nbytes:
                gaps.setdefault((buffer, last_write[buffer]), []).append((last_use[buffer], op.index))
            last_use[buffer] = op.index
        last_write.update(dict.fromkeys(op.writes, op.index))
    made_bytes: dict[int, int] = {}
    for buffer, written in gaps:
        made_bytes[written] = made_bytes.get(written, 0) + program.buffers[buffer].nbytes
    repeatable = _repeatable(program)
    versions = []
    for (buffer, written), found in gaps.items():
        nbytes, share = program.buffers[buffer].nbytes, program.buffers[buffer].nbytes / made_bytes[written]
        recompute_seconds = costs.seconds[written] * share if written in repeatable else math.inf
        versions.append(_BufferVersion(nbytes, written, nbytes >= min_swap_bytes, recompute_seconds, found))
    return [version for version in versions if version.is_swappable or version.recompute_seconds < math.inf]


def _persistent_versions(program: Program, min_swap_bytes: int) -> list[_BufferVersion]:
    """Those of weights and optimizer state, with positions of up to two steps."""
    num_ops = len(program.ops)
    versions = []
    for buffer in program.buffers:
        if not buffer.is_persistent or buffer.nbytes < max(min_swap_bytes, 1):
            continue
        uses = [op.index for op in program.ops if buffer.id in (*op.reads, *op.writes)]
        writes = [op.index for op in program.ops if buffer.id in op.writes]
        starts = writes or uses[:1]
        for start, stop in zip(starts, [*starts[1:], *(first + num_ops for first in starts[:1])], strict=True):
            lived = [use for use in (*uses, *(use + num_ops for use in uses)) if start <= use <= stop]
            gaps = [(after, before) for after, before in pairwise(lived) if before > after + 1]
            if gaps:
                versions.append(_BufferVersion(buffer.nbytes, start, True, math.inf, gaps, has_copy=not writes))
    return versions


def _unrolled(prices: _Prices, num_ops: int) -> _Prices:
    """The prices of two steps, one after the other."""
    cuts = (*prices.cuts, num_ops - 0.5, *(cut + num_ops for cut in prices.cuts))
    return _Prices(cuts, (*prices.memory, 0.0, *prices.memory), prices.out * 2, prices.into * 2)


def _repeatable(program: Program) -> set[int]:
    """Ops marked repeatable whose outputs no other op writes, and whose inputs are not written later."""
    if not any(op.is_repeatable for op in program.ops):
        return set()
    unguarded = unguarded_buffers(program)
    first_use: dict[int, int] = {}
    last_write: dict[int, int] = {}
    for op in program.ops:
        for buffer in (*op.reads, *op.writes):
            first_use.setdefault(buffer, op.index)
        last_write.update(dict.fromkeys(op.writes, op.index))
    return {
        op.index
        for op in program.ops
        if op.is_repeatable
        and all(first_use[buffer] == op.index == last_write[buffer] for buffer in op.writes)
        and all(
            (last_write.get(buffer, -1) < op.index or program.buffers[buffer].is_persistent) and buffer not in unguarded
            for buffer in op.reads
        )
    }


def _min_resident_bytes(program: Program, costs: OpCosts, versions: list[_BufferVersion], cut: int) -> int:
    """Bytes that are resident while the op of a cut runs, under any plan."""
    nbytes = costs.scratch_bytes[cut]
    for buffer, (start, stop) in _lifetimes(program).items():
        nbytes += program.buffers[buffer].nbytes if start <= cut < stop else 0
    for version in versions:
        for position in (cut, cut + len(program.ops)):
            nbytes -= version.nbytes if any(after < position < before for after, before in version.gaps) else 0
    return nbytes


def _lifetimes(program: Program) -> dict[int, tuple[int, int]]:
    """By buffer of the step: the ops [start, stop) during which it is resident when nothing is swapped."""
    found = {b.id: (0, len(program.ops)) for b in program.buffers if b.is_persistent}
    for segment in program.segments:
        for op in program.ops[segment.start : segment.stop]:
            for buffer in {*op.reads, *op.writes}:
                kind = program.buffers[buffer].kind
                if program.buffers[buffer].is_resident or program.buffers[buffer].is_persistent:
                    continue
                start, stop = op.index, op.index + 1
                if kind is BufferKind.TANGENT:
                    start, stop = segment.start, segment.stop
                elif kind in (BufferKind.OUTPUT, BufferKind.GRADIENT):
                    stop = len(program.ops)
                found[buffer] = (found.get(buffer, (start, stop))[0], stop)
    return found


def _min_seconds(version: _BufferVersion, prices: _Prices, link: Link) -> float:
    """The cheapest path through the zones, by dynamic programming from the last backwards over the version's states.

    ``resident`` and ``with_copy`` (it has a host copy too) in a zone; ``dropped`` and ``copied`` at a cut.
    """
    cuts, memory, out, into = prices
    copies = version.is_swappable and (link.out_rate.seconds(version.nbytes), link.in_rate.seconds(version.nbytes))
    resident = with_copy = dropped = copied = 0.0
    later: tuple[int, int] | None = None  # the gap at the next cut
    for cut in reversed(range(bisect_right(cuts, version.written), bisect_left(cuts, version.gaps[-1][1]))):
        gap = next(((after, before) for after, before in version.gaps if after < cuts[cut] < before), None)
        if gap is not None:
            dropped = dropped if gap == later else math.inf
            copied = copied if gap == later else math.inf
            if version.recompute_seconds < math.inf:
                dropped = min(
                    dropped, version.recompute_seconds * _run_price(out[cut + 1], into[cut + 1], link) + resident
                )
            if copies:
                copied = min(copied, copies[1] * into[cut + 1] + with_copy)
            held = version.nbytes * memory[cut]
            with_copy = min(with_copy + held, dropped, copied)
            resident = min(resident + held, dropped)
        if copies:
            resident = min(resident, copies[0] * out[cut] + with_copy)
        later = gap
    return with_copy if version.has_copy else resident


def _compute_seconds(costs: OpCosts, certificate: Certificate, link: Link) -> float:
    """The priced time of all ops, each run once."""
    cuts, lanes = certificate.cuts, (certificate.out_prices, certificate.in_prices)
    zones = pairwise((-1, *cuts, len(costs.seconds)))
    total = 0.0
    for out, into, (before, after) in zip(*lanes, zones, strict=True):
        total += _run_price(out, into, link) * sum(costs.seconds[before + 1 : after])
    for cut, out, into in zip(cuts, *map(pairwise, lanes), strict=True):
        total += _run_price(min(out), min(into), link) * costs.seconds[cut]
    return total


def _run_price(out: float, into: float, link: Link) -> float:
    return min(1.0, (1 - _copy_price(out, into, link)) / link.compute_factor)


def _copy_price(out: float, into: float, link: Link) -> float:
    """The price of a second in which both lanes copy."""
    return max(out, into) + (max(1.0, 2 * link.both_factor) - 1) * min(out, into)
