"""The sizes of a model's inputs that were planned within a budget, and the search for the largest that fits.

The search takes few traces. The bytes that no plan can remove are known for each op of a traced step. They are
interpolated, each op by itself, between up to three sizes: lines and parabolas of the size to the power of the inputs'
degree. The first line begins at size 0, at which only parameters, gradients and optimizer state would be left.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmswap.analyze.memory import Bytes, StepMemory
from lmswap.cli.model import TracedModel
from lmswap.cli.step_plan import StepPlan
from lmswap.errors import PlanInfeasible, TierError

Outcome = StepPlan | PlanInfeasible | TierError
_MAX_FACTOR = 10_000  # from one size to the next
_MAX_SIZE = 10**9  # where nothing depends on the size
_MAX_POINTS = 3  # of an interpolation


@dataclass(frozen=True)
class Fit:
    """The outcomes within a budget by size, the N of shapes of inputs; where they have none, that of size 1."""

    budget: str
    tried: dict[int, Outcome]
    model: TracedModel | None  # None for a stored program
    micro_batches: int

    @property
    def size(self) -> int:
        """The largest size that fits; 1 if none does."""
        return max((size for size, outcome in self.tried.items() if isinstance(outcome, StepPlan)), default=1)

    @property
    def outcome(self) -> Outcome:
        """That of the largest size."""
        return self.tried[self.size]

    @property
    def note(self) -> str:
        """On the operators that were traced, or ""."""
        return self.model.note if self.model else ""

    @property
    def batches(self) -> dict[int, str]:
        """The shapes of inputs by size, where they have an N."""
        return {size: self.model.batch(size) for size in self.tried} if self.model and self.model.degree else {}

    def seconds_per_sample(self, size: int) -> float | None:
        """Predicted seconds of a step by samples, the first size of the first input; None if unknown or refused."""
        outcome = self.tried[size]
        if self.model is None or not isinstance(outcome, StepPlan):
            return None
        return outcome.plan.predicted_seconds / self.model.num_samples(size) / self.micro_batches

    def figures(self) -> dict[str, Any]:
        """Return what `--json` prints: figures of the largest plan or its refusal, and of the sizes that were tried."""
        if isinstance(self.outcome, StepPlan):
            figures = self.outcome.figures()
        else:
            needed_bytes = getattr(self.outcome, "needed_bytes", None)
            figures = {"budget": self.budget, "refused": self.outcome.summary, "needed_bytes": needed_bytes}
        sizes = [
            {"batch": batch, "seconds_per_sample": self.seconds_per_sample(size)}
            for size, batch in self.batches.items()
        ]
        return figures | {"note": self.note, "sizes": sizes}


def find_largest(
    memory_of: Callable[[int], StepMemory], plan: Callable[[StepMemory], Outcome], budget_bytes: int, degree: int
) -> dict[int, Outcome]:
    """Return the outcomes of the sizes that were tried, among them the largest that fits, or of size 1.

    Args:
        memory_of: traces the step of a size.
        plan: plans a step within the budget.
        budget_bytes: see ``plan``.
        degree: the power of the size that inputs grow with.
    """
    tried: dict[int, Outcome] = {}
    floors: dict[int, Bytes] = {}
    size, largest, refused, extra_bytes = 1, 0, None, 0
    while True:
        memory = memory_of(size)
        outcome = tried[size] = plan(memory)
        floors[size] = memory.floor
        floors.setdefault(0, _floor_of_state(memory))
        if isinstance(outcome, PlanInfeasible):  # a plan needs more than what no plan can remove
            extra_bytes = max(extra_bytes, outcome.parts[-1][1] - int(memory.floor.max()))
        known = sorted(tried, key=lambda other: abs(other - size))[:_MAX_POINTS] if len(tried) > 1 else (0, size)
        room_bytes = budget_bytes - memory.program.fixed_memory.total_bytes() - extra_bytes
        guess = _largest_within(room_bytes, {other: floors[other] for other in known}, degree)
        if isinstance(outcome, StepPlan):
            largest, size = size, guess if refused is None else min(guess, refused - 1)
        else:
            refused = size
            size = guess if largest < guess < refused else (largest + refused) // 2
        if size <= largest:
            return dict(sorted(tried.items()))


def _floor_of_state(memory: StepMemory) -> Bytes:
    """Return the part of the step's floor that does not depend on the size of inputs."""
    floor = np.zeros_like(memory.floor)
    for number, live in memory.ranges.items():
        buffer = memory.program.buffers[number]
        if buffer.is_shared:
            floor[list(live.uses)] += buffer.nbytes
        elif buffer.is_gradient:
            floor[live.start : live.stop] += buffer.nbytes
    return floor


def _largest_within(room_bytes: int, floors: dict[int, Bytes], degree: int) -> int:
    """Return the largest size whose floor is at most ``room_bytes``, by a polynomial through those of other sizes."""
    if len({len(floor) for floor in floors.values()}) > 1:  # the model's code depends on the size
        floors = {size: floor.max(keepdims=True) for size, floor in floors.items()}
    points = {size**degree: floor for size, floor in floors.items()}

    def exceeds(size: int) -> bool:
        at = size**degree
        weights = {x: math.prod((at - other) / (x - other) for other in points if other != x) for x in points}
        return float(sum(weights[x] * points[x] for x in points).max()) > room_bytes

    sizes = range(1, min(_MAX_FACTOR * max(floors), _MAX_SIZE) + 1)
    return bisect_left(sizes, True, key=exceeds)
