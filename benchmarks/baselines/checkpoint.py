"""Baseline "checkpoint": torch.utils.checkpoint around the modules of one depth, such as a transformer's layers.

A checkpointed block keeps its outputs. The rest is freed in the forward pass, and recomputed all at once when the
backward pass first needs any of it. As in torch, recomputation runs from the block's first op to the last one that the
backward needs. Random ops are not recomputed: their results are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.refusal import infeasible
from lmswap.analyze.memory import Bytes, StepMemory
from lmswap.analyze.repeatable import repeatable_ops
from lmswap.ir.plan import Plan, Recompute
from lmswap.ir.program import BufferKind, Op, Program, Segment
from lmswap.planner.build_plan import build_plan
from lmswap.planner.problem import Problem


def plan_checkpoint(problem: Problem) -> Plan:
    """Checkpoints as few blocks as the budget requires, the first ones, at the depth at which that costs least.

    Raises:
        PlanInfeasible: at no depth does any number of blocks fit.
    """
    memory = problem.memory
    choices = list(_choices(memory))
    fitting: dict[int, _Choice] = {}
    for choice in choices:
        if choice.peak_bytes <= problem.budget_bytes:
            fitting.setdefault(choice.depth, choice)
    if fitting:
        best = min(fitting.values(), key=lambda choice: choice.seconds)
        return build_plan(problem, "checkpoint", (), _recomputes(best.blocks))
    raise infeasible(problem, "checkpoint", _recomputes(min(choices, key=lambda choice: choice.peak_bytes).blocks))


@dataclass(frozen=True)
class _Block:
    ops: tuple[int, ...]  # recomputed, in order
    position: int  # just before the first op of the backward that needs any of it


@dataclass(frozen=True)
class _Choice:
    depth: int
    blocks: Sequence[_Block]
    seconds: float  # of recomputes
    peak_bytes: int


def _choices(memory: StepMemory) -> Iterator[_Choice]:
    """Yields, for each module depth, the step with its first 0, 1, 2 … blocks checkpointed."""
    program, seconds = memory.program, memory.costs.seconds
    repeatable = repeatable_ops(program)
    deepest = max((op.module.count(".") + 1 for op in program.ops), default=1)
    for depth in range(1, deepest + 1):
        blocks = _blocks(program, depth, repeatable)
        added_seconds = 0.0
        for count, peak_bytes in enumerate(_Trial(memory, blocks).peaks()):
            if count:
                added_seconds += sum(seconds[op] for op in blocks[count - 1].ops)
            yield _Choice(depth, blocks[:count], added_seconds, peak_bytes)


def _blocks(program: Program, depth: int, repeatable: Sequence[bool]) -> list[_Block]:
    """The blocks that can free memory, in forward order: runs of forward ops within one module of ``depth``."""

    def module(op: Op) -> str:
        path = op.module.split(".")
        return ".".join(path[:depth]) if len(path) >= depth else ""

    readers: dict[int, list[int]] = defaultdict(list)
    for op in program.ops:
        for buffer in op.reads:
            readers[buffer].append(op.index)
    found = []
    for forward in program.segments:
        backward = next((s for s in program.segments if s != forward and forward.can_pass_values_to(s)), None)
        if backward is None:
            continue
        for path, ops in groupby(program.ops[forward.start : forward.stop], key=module):
            run = list(ops)
            inside = range(run[0].index, run[-1].index + 1)
            again = [op for op in run if repeatable[op.index]]
            block = _block(program, again, inside, backward, readers) if path else None
            if block is not None:
                found.append(block)
    return found


def _block(
    program: Program, again: Sequence[Op], inside: range, backward: Segment, readers: dict[int, list[int]]
) -> _Block | None:
    """The block that recomputes the ops ``again``; None if it drops nothing that the backward needs."""
    first_need, last_op = backward.stop, -1
    for op in again:
        for buffer in op.writes:
            in_backward = [reader for reader in readers[buffer] if backward.start <= reader < backward.stop]
            stays_inside = all(reader in inside for reader in readers[buffer] if reader not in in_backward)
            if in_backward and stays_inside and program.buffers[buffer].kind is BufferKind.ACTIVATION:
                first_need, last_op = min(first_need, in_backward[0]), op.index
    if last_op < 0:
        return None
    return _Block(tuple(op.index for op in again if op.index <= last_op), first_need)


class _Trial:
    """The step's memory with more and more blocks checkpointed; its time axis has a slot for every possible run."""

    def __init__(self, memory: StepMemory, blocks: Sequence[_Block]) -> None:
        self._program, self._blocks = memory.program, blocks
        again = sorted((block.position, op, number) for number, block in enumerate(blocks) for op in block.ops)
        self._slots: list[int] = []  # by slot: the op
        self._owners: list[int] = []  # by slot: the block that recomputes it, or -1
        self._uses: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)  # by buffer: slot, owner, is recomputed
        self._starts: list[int] = []  # by position: its first slot
        next_again = 0
        for op in self._program.ops:
            self._starts.append(len(self._slots))
            while next_again < len(again) and again[next_again][0] == op.index:
                _, repeated, number = again[next_again]
                self._add_slot(self._program.ops[repeated], number)
                next_again += 1
            self._add_slot(op, -1)
        self._scratch = np.array(memory.costs.scratch_bytes, np.int64)[self._slots]

    def peaks(self) -> Iterator[int]:
        """Yields the peak in bytes with the first 0, 1, 2 … blocks checkpointed."""
        runs = np.array(self._owners) == -1
        change = np.zeros(len(self._slots) + 1, np.int64)
        for buffer in self._uses:
            self._add(change, buffer, 0)
        yield self._peak(change, runs)
        for number, block in enumerate(self._blocks):
            ops = [self._program.ops[op] for op in block.ops]
            for buffer in {buffer for op in ops for buffer in (*op.reads, *op.writes)} & self._uses.keys():
                self._add(change, buffer, number, sign=-1)
                self._add(change, buffer, number + 1)
            runs |= np.array(self._owners) == number
            yield self._peak(change, runs)

    def _peak(self, change: Bytes, runs: NDArray[np.bool_]) -> int:
        return int((np.cumsum(change[:-1]) + self._scratch)[runs].max(initial=0))

    def _add_slot(self, op: Op, owner: int) -> None:
        for buffer in dict.fromkeys((*op.reads, *op.writes)):
            if not self._program.buffers[buffer].is_resident:
                self._uses[buffer].append((len(self._slots), owner, owner >= 0 and buffer in op.writes))
        self._slots.append(op.index)
        self._owners.append(owner)

    def _add(self, change: Bytes, buffer: int, count: int, *, sign: int = 1) -> None:
        """Adds the bytes of ``buffer``, times ``sign``, to ``change`` by slot, with ``count`` blocks checkpointed."""
        nbytes = sign * self._program.buffers[buffer].nbytes
        for start, stop in self._lives(buffer, count):
            change[start] += nbytes
            change[stop] -= nbytes

    def _lives(self, buffer: int, count: int) -> list[list[int]]:
        lives: list[list[int]] = []
        for slot, owner, is_recomputed in self._uses[buffer]:
            if owner >= count:
                continue
            if is_recomputed or not lives:
                lives.append([slot, slot])
            lives[-1][1] = slot + 1
        kind = self._program.buffers[buffer].kind
        if kind is BufferKind.TANGENT:
            first, last = (self._program.segment_of(self._slots[slot]) for slot in (lives[0][0], lives[0][1] - 1))
            lives[0] = [self._starts[first.start], [*self._starts, len(self._slots)][last.stop]]
        elif kind in (BufferKind.OUTPUT, BufferKind.GRADIENT):
            lives[0][1] = len(self._slots)
        return lives


def _recomputes(blocks: Sequence[_Block]) -> tuple[Recompute, ...]:
    recomputes = [Recompute(op, block.position) for block in blocks for op in block.ops]
    return tuple(sorted(recomputes, key=lambda recompute: (recompute.position, recompute.op)))
