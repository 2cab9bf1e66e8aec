"""Block swap: trainers' usual way to train an adapter on a base that is larger than the card.

Some blocks of a decoder, spread evenly, are swapped: two slots on the device hold the block that runs and the next
swapped one, which is copied in as soon as the block before the running one has left its slot. The others stay. A frozen
block is never copied out. (musubi-tuner's ``--blocks_to_swap`` with copies in only; diffusion-pipe and OneTrainer have
the same scheme.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import BufferKind, Program
from lmswap.planner.memory.pack_tier import assign_offsets
from lmswap.planner.simulate import simulate

_BLOCK = re.compile(r"\.(\d+)\.")
_SLOTS = 2


def plan_block_swap(
    program: Program, costs: OpCosts, machine: Machine, *, budget_bytes: int, min_swap_bytes: int
) -> Plan | None:
    """The fastest block swap within the budget: the fewest blocks that fit; None if all blocks do not.

    Args:
        program: one step, with frozen weights named by their blocks ("layers.3.q_proj.weight").
        costs: of its ops.
        machine: with a tier "host".
        budget_bytes: of the step.
        min_swap_bytes: smaller weights stay.
    """
    blocks, uses = _blocks(program, min_swap_bytes), _uses(program)
    for count in range(len(blocks) + 1):
        chosen = [blocks[(2 * number + 1) * len(blocks) // (2 * count)] for number in range(count)]
        swaps, num_bytes = assign_offsets(program, _swaps(len(program.ops), uses, chosen))
        plan = Plan("block swap", budget_bytes, swaps, 0.0, 0, {"host": num_bytes})
        timeline = simulate(program, costs, machine, plan)
        if timeline.peak_bytes <= budget_bytes:
            return replace(plan, predicted_seconds=timeline.seconds, predicted_peak_bytes=timeline.peak_bytes)
    return None


def _blocks(program: Program, min_swap_bytes: int) -> list[list[int]]:
    """Frozen weights by block, in order."""
    written = {buffer for op in program.ops for buffer in op.writes}
    found: dict[int, list[int]] = defaultdict(list)
    for buffer in program.buffers:
        block = _BLOCK.search(f".{buffer.name}")
        is_frozen = buffer.kind is BufferKind.WEIGHT and buffer.id not in written
        if is_frozen and buffer.nbytes >= min_swap_bytes and block is not None:
            found[int(block[1])].append(buffer.id)
    return [found[block] for block in sorted(found)]


def _swaps(num_ops: int, uses_in_step: dict[int, list[int]], blocks: list[list[int]]) -> list[Swap]:
    """Swaps between the visits of each block, in order of need."""
    uses = {buffer: _around(uses_in_step[buffer], num_ops) for block in blocks for buffer in block}
    visits = _visits({number: sorted(u for b in block for u in uses[b]) for number, block in enumerate(blocks)})
    swaps = []
    for number, (start, _, block) in enumerate(visits):
        if not num_ops <= start < 2 * num_ops:
            continue
        before = max(earlier for earlier in range(number) if visits[earlier][2] == block)
        if number - before < _SLOTS:
            continue  # it is still in its slot
        left, ready = visits[before][1] + 1, visits[number - _SLOTS][1] + 1
        shift = left // num_ops * num_ops
        if ready < shift + num_ops <= start:
            ready = shift + num_ops  # nothing is under way between steps
        for buffer in blocks[block]:
            first_use = min(use for use in uses[buffer] if use >= start)
            release, in_start = left - shift, min(ready, first_use) - shift
            swaps.append(Swap(buffer, "host", 0, None, release, max(release, in_start), first_use - shift))
    return sorted(swaps, key=lambda swap: swap.first_use % num_ops)


def _uses(program: Program) -> dict[int, list[int]]:
    """By buffer: the ops that use it."""
    found: dict[int, list[int]] = defaultdict(list)
    for op in program.ops:
        for buffer in {*op.reads, *op.writes}:
            found[buffer].append(op.index)
    return found


def _around(positions: list[int], num_ops: int) -> list[int]:
    """The positions in the step before, in this one, and in the next, from the start of the first."""
    return [position + step * num_ops for step in range(3) for position in positions]


def _visits(uses: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """(First op, last op, block) of the stretches in which no other block is used, in order."""
    found: list[tuple[int, int, int]] = []
    for use, block in sorted((use, block) for block, used in uses.items() for use in used):
        if found and found[-1][2] == block:
            found[-1] = (found[-1][0], use, block)
        else:
            found.append((use, use, block))
    return found
