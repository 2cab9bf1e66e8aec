"""Independent verifier of plans: shares no code with planner, simulator or analysis.

Naive on purpose: memory is summed over all buffers, swaps of one buffer are compared in pairs, and so are copies whose
offsets overlap. Rules, by the name that a `PlanInvalid` carries:

recomputes  in order; of repeatable ops, after their first run, in a segment that can read their inputs; every op, in
            both runs, reads what it reads in the program itself; a recompute reads nothing that the step's caller may
            have written since, unless eager torch would raise an error
buffers     only known buffers that are visible inside the step only, or persistent, are swapped, to a tier of the
            machine
order       out_start ≤ release ≤ in_start ≤ first_use, within the program; or, for persistent buffers, within it and
            the next step, without a copy under way where the one ends and the other begins
residency   the buffer is resident at each of its uses, and is prefetched only for a use
copy        the copy out holds what the buffer held when it was released
overlap     swaps of one buffer do not overlap
segments    for activations, out_start and release lie in the segment of the last use before, in_start and first_use in
            that of the next; release may be in the next one too, if that follows directly and receives the buffer;
            a host copy that is reused was passed to its segment with the buffer
lanes       swaps are listed in order of need, which breaks ties between copies queued at one position
tier        copies are at whole pages, within the capacity, and disjoint while they are held: of persistent buffers
            for good, in one place
capacity    resident bytes, scratch and copies under way included, never exceed the budget
prediction  the peak that the plan states is the one it has
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from lmswap.errors import PlanInvalid
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Buffer, BufferKind, Program, Segment
from lmswap.ir.schedule import Schedule, schedule

_PAGE_BYTES = 4096


def verify(program: Program, costs: OpCosts, machine: Machine, plan: Plan) -> None:
    """Checks ``plan`` against ``program``.

    Raises:
        PlanInvalid: names the rule that is broken, where, and how.
    """
    if plan.recomputes:
        _check_recomputes(program, plan)
        runs = schedule(program, plan.recomputes)
        _check_contents(program, runs)
        program, costs = runs.program, runs.costs(costs)
    uses: list[list[int]] = [[] for _ in program.buffers]
    writes: list[list[int]] = [[] for _ in program.buffers]
    for op in program.ops:
        for buffer in {*op.reads, *op.writes}:
            uses[buffer].append(op.index)
        for buffer in set(op.writes):
            writes[buffer].append(op.index)
    segments = _segments(program)
    swaps_of: dict[int, list[Swap]] = {}  # by buffer: those that were checked
    for swap in plan.swaps:
        earlier = swaps_of.setdefault(swap.buffer, [])
        _check_buffer(program, machine, swap)
        if program.buffers[swap.buffer].is_persistent:
            _check_cyclic_order(program, swap)
            earlier.append(swap)
            continue
        _check_order(program, swap)
        _check_residency(swap, uses[swap.buffer])
        _check_copy(swap, earlier, writes[swap.buffer])
        _check_overlap(swap, earlier)
        if not program.buffers[swap.buffer].is_shared:
            _check_segments(segments, swap, earlier, uses[swap.buffer])
        earlier.append(swap)
    for buffer, found in swaps_of.items():
        if program.buffers[buffer].is_persistent:
            _check_cycle(len(program.ops), found, uses[buffer], writes[buffer])
    _check_lanes(program, plan)
    _check_tiers(program, machine, plan)
    peak_bytes = _check_capacity(program, costs, plan, uses, segments)
    _check_prediction(plan, peak_bytes)


def _check_recomputes(program: Program, plan: Plan) -> None:
    writers = Counter(buffer for op in program.ops for buffer in set(op.writes))
    unguarded, segments = unguarded_buffers(program), _segments(program)
    for number, recompute in enumerate(plan.recomputes):
        if not 0 <= recompute.op < recompute.position < len(program.ops):
            raise PlanInvalid(
                "recomputes", f"recomputed at {recompute.position} of {len(program.ops)} ops", op=recompute.op
            )
        if number and plan.recomputes[number - 1].position > recompute.position:
            raise PlanInvalid(
                "recomputes", f"listed after one at {plan.recomputes[number - 1].position}", op=recompute.op
            )
        if not program.ops[recompute.op].is_repeatable or not program.ops[recompute.op].writes:
            raise PlanInvalid("recomputes", "a recompute is not bitwise identical, or writes nothing", op=recompute.op)
        for buffer in program.ops[recompute.op].writes:
            if writers[buffer] > 1:
                raise PlanInvalid("recomputes", "another op writes what it makes", op=recompute.op, buffer=buffer)
        for buffer in unguarded.intersection(program.ops[recompute.op].reads):
            raise PlanInvalid("recomputes", "the caller may have written what it reads", op=recompute.op, buffer=buffer)
        origin, segment = segments[recompute.op], segments[recompute.position]
        if origin != segment and not _can_pass_values(origin, segment):
            raise PlanInvalid(
                "recomputes", f"belongs to another segment than position {recompute.position}", op=recompute.op
            )


def unguarded_buffers(program: Program) -> set[int]:
    """Buffers that the caller holds and a forward reads, but no backward: torch does not detect writes to them."""
    phases: dict[int, set[str]] = {buffer.id: set() for buffer in program.buffers}
    is_own: dict[int, bool] = {}  # by buffer: whether the first op that names it makes it
    for op, segment in zip(program.ops, _segments(program), strict=True):
        for buffer in op.reads:
            phases[buffer].add(segment.phase)
            is_own.setdefault(buffer, False)
        for buffer in op.writes:
            is_own.setdefault(buffer, True)
    callers = {
        buffer.id
        for buffer in program.buffers
        if buffer.kind is BufferKind.OUTPUT or (buffer.kind is BufferKind.INPUT and not is_own.get(buffer.id))
    }
    return {buffer for buffer in callers if "forward" in phases[buffer] and "backward" not in phases[buffer]}


def _check_contents(program: Program, runs: Schedule) -> None:
    """Traces the contents of each buffer, a number per version, through the program and through the schedule."""
    names: dict[object, int] = {}
    planned: dict[int, tuple[list[int], list[int]]] = {}  # by op: contents that it reads, contents that it writes
    held_before = [names.setdefault(("from outside", buffer.id), len(names)) for buffer in program.buffers]
    held = list(held_before)
    for op in program.ops:
        read = [held[buffer] for buffer in op.reads]
        made = [names.setdefault((op.index, number), len(names)) for number in range(len(op.writes))]
        for buffer, content in zip(op.writes, made, strict=True):
            held[buffer] = content
        planned[op.index] = (read, made)
    first_runs: list[int] = []
    now = held_before + [-1] * (len(runs.buffers) - len(program.buffers))
    for op, origin in zip(runs.program.ops, runs.ops, strict=True):
        read, made = planned[origin]
        if [now[buffer] for buffer in op.reads] != read:
            raise PlanInvalid("recomputes", f"run {op.index} of it reads other contents than the program's", op=origin)
        for buffer, content in zip(op.writes, made, strict=True):
            now[buffer] = content
        if origin == len(first_runs):  # its first run
            first_runs.append(origin)
    if first_runs != [op.index for op in program.ops]:
        raise PlanInvalid("recomputes", f"only {len(first_runs)} of {len(program.ops)} ops run in order")


def _check_buffer(program: Program, machine: Machine, swap: Swap) -> None:
    if not 0 <= swap.buffer < len(program.buffers):
        raise PlanInvalid("buffers", f"the program has {len(program.buffers)} buffers", buffer=swap.buffer)
    buffer = program.buffers[swap.buffer]
    if not buffer.is_swappable:
        raise PlanInvalid("buffers", f"its kind is '{buffer.kind}', it is visible outside the step", buffer=swap.buffer)
    if swap.tier not in [tier.name for tier in machine.tiers]:
        raise PlanInvalid("buffers", f"machine '{machine.name}' has no tier '{swap.tier}'", buffer=swap.buffer)


def _check_order(program: Program, swap: Swap) -> None:
    start = swap.release if swap.out_start is None else swap.out_start
    if not 0 <= start <= swap.release <= swap.in_start <= swap.first_use < len(program.ops):
        raise PlanInvalid(
            "order",
            f"out_start {swap.out_start}, release {swap.release}, in_start {swap.in_start}, first_use "
            f"{swap.first_use} of {len(program.ops)} ops",
            buffer=swap.buffer,
        )


def _check_residency(swap: Swap, uses: list[int]) -> None:
    for use in uses:
        if swap.release <= use < swap.first_use:
            raise PlanInvalid(
                "residency", f"non-resident from {swap.release} to {swap.first_use}", buffer=swap.buffer, op=use
            )
    if not any(use < swap.release for use in uses):
        raise PlanInvalid("residency", f"released at {swap.release}, before it exists", buffer=swap.buffer)
    if not any(use >= swap.first_use for use in uses):
        raise PlanInvalid("residency", f"prefetched for {swap.first_use}, after its last use", buffer=swap.buffer)


def _check_copy(swap: Swap, earlier: Sequence[Swap], writes: list[int]) -> None:
    copied = swap.out_start
    if copied is None:
        same_place = [other for other in earlier if (other.tier, other.offset) == (swap.tier, swap.offset)]
        copied = max((e.out_start for e in same_place if e.out_start is not None), default=None)
    if copied is None:
        raise PlanInvalid("copy", "no copy out, and no earlier one at its offset in the tier", buffer=swap.buffer)
    for write in writes:
        if copied <= write < swap.release:
            raise PlanInvalid("copy", f"written after the copy out at {copied}", buffer=swap.buffer, op=write)


def _check_overlap(swap: Swap, earlier: Sequence[Swap]) -> None:
    start = swap.release if swap.out_start is None else swap.out_start
    for other in earlier:
        if other.first_use > start:
            raise PlanInvalid(
                "overlap", f"swapped out twice, from {other.release} and {swap.release}", buffer=swap.buffer
            )


def _check_cyclic_order(program: Program, swap: Swap) -> None:
    num_ops = len(program.ops)
    start = swap.release if swap.out_start is None else swap.out_start
    is_ordered = 0 <= start <= swap.release <= swap.in_start <= swap.first_use < start + num_ops
    is_at_rest = swap.first_use < num_ops or start >= num_ops or swap.release <= num_ops <= swap.in_start
    if not is_ordered or not is_at_rest or swap.first_use >= 2 * num_ops:
        raise PlanInvalid(
            "order",
            f"out_start {swap.out_start}, release {swap.release}, in_start {swap.in_start}, first_use "
            f"{swap.first_use} in a cycle of {num_ops} ops",
            buffer=swap.buffer,
        )


def _check_cycle(num_ops: int, swaps: Sequence[Swap], uses: list[int], writes: list[int]) -> None:
    """Checks all swaps of one persistent buffer, as they follow each other in step after step."""
    around = (-num_ops, 0, num_ops)
    for number, swap in enumerate(swaps):
        for use in (use + shift for use in uses for shift in around):
            if swap.release <= use < swap.first_use:
                raise PlanInvalid(
                    "residency", f"non-resident from {swap.release} to {swap.first_use}", buffer=swap.buffer, op=use
                )
        start = swap.release if swap.out_start is None else swap.out_start
        for other, shift in ((other, shift) for other in swaps[number + 1 :] for shift in around):
            other_start = shift + (other.release if other.out_start is None else other.out_start)
            if start < other.first_use + shift and other_start < swap.first_use:
                raise PlanInvalid(
                    "overlap", f"swapped out twice, from {swap.release} and {other.release}", buffer=swap.buffer
                )
            if (swap.tier, swap.offset) != (other.tier, other.offset):
                raise PlanInvalid("tier", "host copies in two places", buffer=swap.buffer)
        if not writes:
            continue  # its host copy is valid for good
        copies = [c.out_start + shift for c in swaps if c.out_start is not None for shift in around]
        copied = max((copy for copy in copies if copy <= swap.release), default=None)
        if copied is None:
            raise PlanInvalid("copy", "it is written, and never copied out", buffer=swap.buffer)
        for write in (write + shift for write in writes for shift in around):
            if copied <= write < swap.release:
                raise PlanInvalid("copy", f"written after the copy out at {copied}", buffer=swap.buffer, op=write)


def _check_segments(segments: Sequence[Segment], swap: Swap, earlier: Sequence[Swap], uses: list[int]) -> None:
    origin = segments[max(use for use in uses if use < swap.release)]
    destination = segments[min(use for use in uses if use >= swap.first_use)]
    start = origin.start if swap.out_start is None else swap.out_start
    is_passed_directly = _can_pass_values(origin, destination) and origin.stop == destination.start
    if not origin.start <= start <= origin.stop or not (swap.release <= origin.stop or is_passed_directly):
        raise PlanInvalid(
            "segments",
            f"swapped out from {start} to {swap.release}, its last user runs in [{origin.start}, {origin.stop})",
            buffer=swap.buffer,
        )
    if not destination.start <= swap.in_start <= swap.first_use < destination.stop:
        raise PlanInvalid(
            "segments",
            f"prefetched from {swap.in_start} to {swap.first_use}, its next user runs in "
            f"[{destination.start}, {destination.stop})",
            buffer=swap.buffer,
        )
    if swap.out_start is None:
        fetched = max(other.first_use for other in earlier)
        if not origin.start <= fetched < origin.stop:
            raise PlanInvalid(
                "segments",
                f"its copy was last prefetched for {fetched}, but it is swapped out in [{origin.start}, {origin.stop})",
                buffer=swap.buffer,
            )
    if origin != destination and not _can_pass_values(origin, destination):
        raise PlanInvalid(
            "segments",
            f"{origin.phase} of graph {origin.graph} passes nothing to {destination.phase} of graph "
            f"{destination.graph}",
            buffer=swap.buffer,
        )


def _can_pass_values(origin: Segment, destination: Segment) -> bool:
    return (origin.phase, destination.phase) == ("forward", "backward") and origin.graph == destination.graph


def _segments(program: Program) -> list[Segment]:
    """By op: its segment."""
    return [segment for segment in program.segments for _ in range(segment.start, segment.stop)]


def _check_lanes(program: Program, plan: Plan) -> None:
    num_ops = len(program.ops)
    for earlier, later in pairwise(plan.swaps):
        if earlier.first_use % num_ops > later.first_use % num_ops:
            raise PlanInvalid(
                "lanes",
                f"listed after buffer {earlier.buffer}, which is needed later ({earlier.first_use} > "
                f"{later.first_use})",
                buffer=later.buffer,
            )


def _check_tiers(program: Program, machine: Machine, plan: Plan) -> None:
    for tier, capacity_bytes in plan.tier_bytes.items():
        if capacity_bytes > machine.tier(tier).held_bytes:
            has_bytes = machine.tier(tier).held_bytes
            raise PlanInvalid("tier", f"needs {capacity_bytes} bytes of tier '{tier}', it has {has_bytes}")
    copies: dict[tuple[str, int, int], list[list[int]]] = {}  # by tier, offset, buffer: [from, to] in positions, each
    for swap in plan.swaps:
        capacity_bytes = plan.tier_bytes.get(swap.tier, 0)
        stop = swap.offset + program.buffers[swap.buffer].nbytes
        if swap.offset % _PAGE_BYTES or not 0 <= swap.offset <= stop <= capacity_bytes:
            raise PlanInvalid("tier", f"bytes [{swap.offset}, {stop}) of {capacity_bytes}", buffer=swap.buffer)
        held = copies.setdefault((swap.tier, swap.offset, swap.buffer), [])
        if program.buffers[swap.buffer].is_persistent:
            held[:] = [[0, len(program.ops)]]
            continue
        if swap.out_start is not None:
            held.append([swap.out_start, swap.first_use])
        held[-1][1] = swap.first_use  # without a copy out, the last copy is read again
    blocks = sorted(
        (tier, offset, offset + program.buffers[buffer].nbytes, start, stop, buffer)
        for (tier, offset, buffer), held in copies.items()
        for start, stop in held
    )
    for index, (tier, low, high, start, stop, buffer) in enumerate(blocks):
        for other_tier, other_low, other_high, other_start, other_stop, other in islice(blocks, index + 1, None):
            if other_tier != tier or other_low >= high:  # no later block overlaps either
                break
            if buffer != other and low < other_high and start <= other_stop and other_start <= stop:
                raise PlanInvalid("tier", f"overlaps buffer {buffer} in the tier", buffer=other)


def _check_capacity(
    program: Program, costs: OpCosts, plan: Plan, uses: list[list[int]], segments: Sequence[Segment]
) -> int:
    change = [0] * (len(program.ops) + 1)  # of resident bytes, by position
    for buffer in program.buffers:
        start, stop = _lifetime(segments, buffer, uses[buffer.id])
        change[start] += buffer.nbytes
        change[stop] -= buffer.nbytes
    for swap in plan.swaps:
        nbytes, num_ops = program.buffers[swap.buffer].nbytes, len(program.ops)
        for shift in (0, num_ops):  # the parts in this step and in the next, which is like this one
            start, stop = max(swap.release - shift, 0), min(swap.in_start - shift, num_ops)
            if start < stop:
                change[start] -= nbytes
                change[stop] += nbytes
    resident = np.array(costs.scratch_bytes, np.int64) + np.cumsum(np.array(change[:-1], np.int64))
    peak_bytes = int(resident.max(initial=0))
    if peak_bytes > plan.budget_bytes:
        raise PlanInvalid(
            "capacity", f"{peak_bytes} bytes are resident, {plan.budget_bytes} allowed", op=int(resident.argmax())
        )
    return peak_bytes


def _lifetime(segments: Sequence[Segment], buffer: Buffer, uses: list[int]) -> tuple[int, int]:
    kind = buffer.kind
    if buffer.is_persistent:
        return 0, len(segments)
    if not uses or buffer.is_resident:
        return 0, 0
    if kind is BufferKind.TANGENT:
        return segments[uses[0]].start, segments[uses[-1]].stop
    if kind in (BufferKind.OUTPUT, BufferKind.GRADIENT):
        return uses[0], len(segments)
    return uses[0], uses[-1] + 1


def _check_prediction(plan: Plan, peak_bytes: int) -> None:
    if plan.predicted_peak_bytes != peak_bytes:
        raise PlanInvalid("prediction", f"peak is {peak_bytes} bytes, stated are {plan.predicted_peak_bytes}")
    if not math.isfinite(plan.predicted_seconds) or plan.predicted_seconds < 0:
        raise PlanInvalid("prediction", f"stated seconds are {plan.predicted_seconds}")
