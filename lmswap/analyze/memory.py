"""Memory curves of a step: bytes resident at each op, and lower bounds on what any plan leaves.

Bytes count activations, outputs, tangents, gradients and the scratch of the running op, and the weights and optimizer
state that plans place. Parameters and inputs live outside the step and are not part of any curve here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lmswap.analyze.liveness import LiveRange, live_ranges
from lmswap.analyze.repeatable import repeatable_ops
from lmswap.ir.costs import OpCosts
from lmswap.ir.plan import Recompute
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.schedule import Schedule, schedule

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Peak:
    """The highest point of a memory curve: bytes, the op that runs there, and live (name, bytes), largest first."""

    nbytes: int
    op: int
    live: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step in which every buffer is kept; results are cached."""

    program: Program
    costs: OpCosts
    # Smaller buffers, and those of other kinds, are left out of allocated_bytes, freed_bytes and the curve.
    min_counted_bytes: int = 0
    released: frozenset[int] = frozenset()  # outputs and tangents that the caller does not hold
    counted_kind: BufferKind | None = None  # None: all

    def with_recomputes(self, recomputes: Sequence[Recompute]) -> tuple[Schedule, StepMemory]:
        """The schedule of the step with ``recomputes``, and its memory."""
        runs = schedule(self.program, recomputes)
        return runs, replace(self, program=runs.program, costs=runs.costs(self.costs)) if recomputes else self

    def counted_bytes(self, buffer: int) -> int:
        """Bytes that ``buffer`` adds to the curve."""
        found = self.program.buffers[buffer]
        is_counted = found.nbytes >= self.min_counted_bytes and self.counted_kind in (None, found.kind)
        return found.nbytes if is_counted else 0

    @cached_property
    def ranges(self) -> dict[int, LiveRange]:
        """See `lmswap.analyze.liveness.live_ranges`."""
        return live_ranges(self.program, self.released)

    @cached_property
    def repeatable(self) -> tuple[bool, ...]:
        """See `lmswap.analyze.repeatable.repeatable_ops`."""
        return repeatable_ops(self.program)

    @cached_property
    def allocated_bytes(self) -> list[int]:
        """By op: bytes whose live range starts there; the last entry, 0, is the end of the step."""
        return self._changes((live_range.start, live_range.buffer) for live_range in self.ranges.values())

    @cached_property
    def freed_bytes(self) -> list[int]:
        """By position: bytes whose live range stops there; they are free before that op's outputs are allocated."""
        return self._changes((live_range.stop, live_range.buffer) for live_range in self.ranges.values())

    def _changes(self, ends: Iterable[tuple[int, int]]) -> list[int]:
        changes = [0] * (len(self.program.ops) + 1)
        for position, buffer in ends:
            changes[position] += self.counted_bytes(buffer)
        return changes

    @cached_property
    def curve(self) -> Bytes:
        """By op: bytes while it runs, its inputs, outputs and scratch included."""
        change = np.asarray(self.allocated_bytes, np.int64) - np.asarray(self.freed_bytes, np.int64)
        return np.cumsum(change)[: len(self.program.ops)] + np.asarray(self.costs.scratch_bytes, np.int64)

    @cached_property
    def floor(self) -> Bytes:
        """By op: bytes that are resident under any plan: what it uses, its scratch, what cannot be swapped.

        Its maximum is a lower bound on the peak of every plan without recomputes.
        """
        buffers = self.program.buffers
        floor = np.asarray(self.costs.scratch_bytes, np.int64).copy()
        for buffer, live_range in self.ranges.items():
            if buffers[buffer].is_swappable:
                floor[list(live_range.uses)] += buffers[buffer].nbytes
            else:
                floor[live_range.start : live_range.stop] += buffers[buffer].nbytes
        return floor

    @cached_property
    def op_starts(self) -> list[float]:
        """By position: seconds from the start of a step without stalls; the last is the end."""
        return list(accumulate(self.costs.seconds, initial=0.0))

    def fixed_at(self, op: int) -> list[int]:
        """The buffers that are resident under any plan while ``op`` runs: what it uses, and what cannot be swapped."""
        buffers = self.program.buffers
        present = [live_range for live_range in self.ranges.values() if live_range.start <= op < live_range.stop]
        return [r.buffer for r in present if op in r.uses or not buffers[r.buffer].is_swappable]

    @property
    def peak(self) -> Peak:
        """The peak when every buffer is kept."""
        return self.peak_of(self.curve)

    def peak_of(self, curve: Bytes) -> Peak:
        """The peak of ``curve``, one of this step's, with the buffers that count in it."""
        if not len(curve):
            return Peak(0, 0, ())
        op = int(curve.argmax())
        live = [r.buffer for r in self.ranges.values() if r.start <= op < r.stop]
        return Peak(int(curve[op]), op, self.largest(self.fixed_at(op) if curve is self.floor else live, op))

    def largest(self, buffers: list[int], op: int) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of ``buffers`` and of the scratch of ``op``, largest first."""
        sizes = [(self.program.buffer_names[buffer], self.program.buffers[buffer].nbytes) for buffer in buffers]
        sizes.append((f"scratch of {self.program.ops[op].name}", self.costs.scratch_bytes[op]))
        return tuple(sorted((size for size in sizes if size[1]), key=lambda size: -size[1]))
