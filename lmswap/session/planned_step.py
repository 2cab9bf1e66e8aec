"""A planned step: its graphs, the plan they follow, and the inputs of that plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lmswap.analyze.memory import StepMemory
from lmswap.capture.merge_programs import Joined
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Timeline
from lmswap.plan.cache import CachedPlan
from lmswap.session.budget import GROWTH_BYTES, Allowance


@dataclass(frozen=True)
class PlannedStep(CachedPlan):
    """One or more graphs that run as one step, and the plan they follow."""

    graphs: tuple[int, ...]
    joined: Joined
    predicted: Timeline
    allowance: Allowance
    made_with: Allowance  # the allowance when the plan was activated
    origin: str  # of the plan: "made in 1.2 s", "from cache"
    segment_seconds: tuple[float, ...] = ()  # of compute, as measured, if known
    released: frozenset[int] = frozenset()  # outputs and tangents known not to be held by the caller
    places: ArenaLayout | None = None  # offsets of its tensors, with an arena
    is_overdrawn: bool = False  # exceeds its allowance, and no plan was found that does not

    @property
    def excess_bytes(self) -> int:
        """Bytes by which its plan exceeds the allowance."""
        return self.tensor_peak_bytes - self.allowance.step_bytes

    @property
    def tensor_peak_bytes(self) -> int:
        """The planned peak of its own tensors, fragmentation included if they have offsets."""
        return max(self.plan.predicted_peak_bytes, self.places.total_bytes if self.places else 0)

    @property
    def is_outgrown(self) -> bool:
        """Whether the excess is large enough to replan, and a smaller plan is not known to be impossible."""
        return self.excess_bytes > GROWTH_BYTES and not self.is_overdrawn

    def small_bytes(self, from_bytes: int) -> int:
        """Return the peak of all buffers smaller than ``from_bytes``."""
        program, costs = self.joined.program, self.costs
        small_curve = StepMemory(program, costs).curve - StepMemory(program, costs, from_bytes).curve
        return int(small_curve.max(initial=0))

    @property
    def adds_up(self) -> bool:
        """Whether each gradient is accumulated as it is computed, into those of the steps before."""
        return self.joined.program.kind_of_gradients is BufferKind.ACCUMULATED_GRADIENT

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The graphs in the planned order of their backwards."""
        return tuple(self.graphs[s.graph] for s in self.joined.program.segments if s.phase == "backward")
