"""What is one planned step? Its graphs, the plan that they follow, and what that was made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lmswap.analyze.memory import StepMemory
from lmswap.capture.join import Joined
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Timeline
from lmswap.plan.cache import CachedPlan
from lmswap.session.allowance import GROWTH_BYTES, Allowance


@dataclass(frozen=True)
class PlannedStep(CachedPlan):
    """One or more graphs that run as one step, and the plan they follow."""

    graphs: tuple[int, ...]
    joined: Joined
    predicted: Timeline
    allowance: Allowance
    made_with: Allowance  # what the allowance was when the plan was put in force
    origin: str  # of the plan: "made in 1.2 s", "from cache"
    segment_seconds: tuple[float, ...] = ()  # of compute in a step that ran, where it is known
    released: frozenset[int] = frozenset()  # outputs and tangents that the caller does not hold, as far as known
    places: ArenaLayout | None = None  # where its tensors lie, with an arena
    is_overdrawn: bool = False  # takes more than its allowance, and no plan was found that does not

    @property
    def excess_bytes(self) -> int:
        """By how much its plan takes more than the allowance."""
        return self.tensor_peak_bytes - self.allowance.step_bytes

    @property
    def tensor_peak_bytes(self) -> int:
        """The most that its own tensors take by its plan, with the holes between them where they have places."""
        return max(self.plan.predicted_peak_bytes, self.places.total_bytes if self.places else 0)

    @property
    def is_outgrown(self) -> bool:
        """Whether it takes so much more that another plan is due, and it is not known that there is none."""
        return self.excess_bytes > GROWTH_BYTES and not self.is_overdrawn

    def small_bytes(self, from_bytes: int) -> int:
        """The most that buffers of less than ``from_bytes`` hold together."""
        program, costs = self.joined.program, self.costs
        small_curve = StepMemory(program, costs).curve - StepMemory(program, costs, from_bytes).curve
        return int(small_curve.max(initial=0))

    @property
    def adds_up(self) -> bool:
        """Whether its gradients are handed over as they are made, to be added to those of the steps before."""
        return self.joined.program.kind_of_gradients is BufferKind.ACCUMULATED_GRADIENT

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The graphs in the order in which their backwards are planned to run."""
        return tuple(self.graphs[s.graph] for s in self.joined.program.segments if s.phase == "backward")
