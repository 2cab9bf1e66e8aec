"""The planning problem: step, machine and limits, as one argument for every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import numpy as np

from lmswap.analyze.liveness import Gap, segment_by_op, swappable_gaps
from lmswap.analyze.memory import Bytes, StepMemory
from lmswap.errors import PlanInfeasible
from lmswap.ir.certificate import Certificate
from lmswap.ir.machine import Link, Machine, Tier
from lmswap.ir.plan import Recompute, Swap
from lmswap.ir.program import Segment
from lmswap.ir.schedule import Schedule
from lmswap.ir.timeline import Timeline
from lmswap.planner import _core
from lmswap.planner.simulate import simulate_swaps

# Positions are chosen for a link of this share of its rate. Plans without slack, for V100 to H200, lost 1.4 to 4 % of
# step time when the link was 10 % slower; slack costs only memory that is free anyway.
PLANNED_LINK_SHARE = 0.9

# A refusal names a budget that is at most this share above the least, if the proven lower bound shows that it is.
_CLOSE_TO_LEAST = 0.01


@dataclass
class Known:
    """What was computed of a step before, shared by problems that differ in their limits; by identity of its inputs."""

    runs: list[tuple[StepMemory, Sequence[Recompute], tuple[Schedule, StepMemory]]] = field(default_factory=list)
    timelines: list[tuple[StepMemory, Sequence[Swap], Sequence[Recompute], Timeline]] = field(default_factory=list)
    steps: list[tuple[StepMemory, frozenset[int], _core.Step]] = field(default_factory=list)  # without these buffers
    making_step: Lock = field(default_factory=Lock)


@dataclass(frozen=True)
class Problem:
    """Fit ``memory``'s step into ``budget_bytes`` by swapping buffers of at least ``min_swap_bytes`` to ``tier``."""

    memory: StepMemory
    machine: Machine
    tier: Tier
    budget_bytes: int
    min_swap_bytes: int
    link_share: float = PLANNED_LINK_SHARE  # of the link's rate that copies are planned for
    fetches_weights: bool = False  # those that move are non-resident between steps; they are only read
    prefetches_ahead: int = 0  # copies in that a search may queue behind the one that is under way
    target_seconds: float = 0.0  # plans at or below it are not improved further
    bound: Certificate | None = None  # of any plan
    find_min_budget: bool = True  # PlanInfeasible carries the smallest budget that fits, which takes several searches
    min_budget: tuple[int, int] = (0, 0)  # proved lower bound on the budget of any plan, and the op where
    known: Known = field(default_factory=Known, repr=False, compare=False)

    @property
    def link(self) -> Link:
        """The path to the tier, at its rates while the device computes."""
        return self.tier.link.while_busy

    @property
    def planned_link(self) -> Link:
        """`link` at the share of its rate that copies are planned for."""
        return self.link.times(self.link_share)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Every gap in which a buffer can be swapped out."""
        return swappable_gaps(self.memory.program, self.memory.ranges, self.min_swap_bytes)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """For each op the segment that executes it."""
        return segment_by_op(self.memory.program)

    def nbytes(self, buffer: int) -> int:
        """Size of a buffer."""
        return self.memory.program.buffers[buffer].nbytes

    @property
    def is_proven_infeasible(self) -> bool:
        """Whether it is proved that no plan fits."""
        return self.budget_bytes < self.min_budget[0]

    @property
    def close_to_least_bytes(self) -> int:
        """The largest budget within `_CLOSE_TO_LEAST` of the proven lower bound on the budget of any plan."""
        return int((1 + _CLOSE_TO_LEAST) * self.min_budget[0])

    def is_forward_to_backward(self, gap: Gap) -> bool:
        """Whether a gap leads from a forward segment to a backward one."""
        return self.segments[gap.after] != self.segments[gap.before]

    def idle_seconds(self, gap: Gap) -> float:
        """Seconds between the two uses, without stalls."""
        return self.memory.op_starts[gap.before] - self.memory.op_starts[gap.after + 1]

    def copy_seconds(self, gap: Gap) -> float:
        """Seconds on the link for one copy out and one in."""
        nbytes = self.nbytes(gap.buffer)
        return self.link.out_rate.seconds(nbytes) + self.link.in_rate.seconds(nbytes)

    def curve_without(self, gaps: Sequence[Gap]) -> Bytes:
        """Bytes by op with the buffers of ``gaps`` non-resident in the whole gap: a lower bound if they are swapped."""
        changes = np.zeros(len(self.memory.curve) + 1, np.int64)
        for gap in gaps:
            changes[gap.after + 1] -= self.nbytes(gap.buffer)
            changes[gap.before] += self.nbytes(gap.buffer)
        return self.memory.curve + np.cumsum(changes[:-1])

    def with_recomputes(self, recomputes: Sequence[Recompute]) -> tuple[Schedule, StepMemory]:
        """See `StepMemory.with_recomputes`; the last result is kept."""
        for memory, known_recomputes, runs in self.known.runs:
            if memory is self.memory and known_recomputes is recomputes:
                return runs
        runs = self.memory.with_recomputes(recomputes)
        self.known.runs[:] = [(self.memory, recomputes, runs)]
        return runs

    def timeline(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute]) -> Timeline:
        """The predicted timeline of a plan; the last one is kept."""
        for memory, known_swaps, known_recomputes, timeline in self.known.timelines:
            if memory is self.memory and known_swaps is swaps and known_recomputes is recomputes:
                return timeline
        timeline = simulate_swaps(self.with_recomputes(recomputes)[1], self.machine, swaps)
        self.known.timelines[:] = [(self.memory, swaps, recomputes, timeline)]
        return timeline

    def fits(self, gaps: Sequence[Gap]) -> bool:
        """Whether the step can fit the budget if ``gaps`` are swapped."""
        return not len(self.memory.curve) or int(self.curve_without(gaps).max()) <= self.budget_bytes

    def infeasible(self, policy: str, gaps: Sequence[Gap]) -> PlanInfeasible:
        """The error with the budget that ``policy`` needs if all ``gaps`` are swapped, and what is live at the peak."""
        curve = self.curve_without(gaps)
        worst = int(curve.argmax())
        offloaded = {gap.buffer for gap in gaps if gap.after < worst < gap.before}
        live = [
            r.buffer for r in self.memory.ranges.values() if r.start <= worst < r.stop and r.buffer not in offloaded
        ]
        op = self.memory.program.ops[worst]
        return PlanInfeasible(
            budget_bytes=self.budget_bytes,
            needed_bytes=int(curve[worst]),
            where=f"op {worst} {op.title}",
            live=self.memory.largest(live, worst),
            policy=policy,
        )
