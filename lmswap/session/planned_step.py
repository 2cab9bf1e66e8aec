"""A planned step: its graphs, the plan they follow, the inputs of that plan, and what runs of it have shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from lmswap.analyze.memory import StepMemory
from lmswap.capture.merge_programs import MergedPrograms
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Timeline
from lmswap.planner import simulate
from lmswap.planner.cache import CachedPlan
from lmswap.session.allowance import GROWTH_BYTES, Allowance

# Origins of plans.
FROM_CACHE, FROM_OTHER_RANK = "from cache", "made by another rank of this machine"
# Earlier runs touch their memory for the first time, and choose algorithms.
_WARM_UP_RUNS = 2


class Phase(IntEnum):
    """How far the predictions of a step rest on its own runs; see `lmswap.session`."""

    TRACED = 0  # planned by estimated or cached costs
    RECORDED = 1  # seconds of its segments are recorded; the next run times its ops
    CALIBRATED = 2  # costs, machine and growth between steps are those of the run that timed the ops
    FINAL = 3  # growth was measured once more, after the last search of the warm-up


@dataclass(frozen=True)
class History:
    """What the runs of a step have shown. Replans of the step keep it; other plans of a step begin without."""

    phase: Phase = Phase.TRACED
    num_runs: int = 0  # counted until `Phase.FINAL`
    segment_seconds: tuple[float, ...] = ()  # of compute by the current plan, without timed ops, if known
    released: frozenset[int] = frozenset()  # outputs and tangents known not to be held by the caller
    min_counted_bytes: int = 0  # smaller buffers are measured as in use between steps
    read_peak_bytes: int = 0  # the step's peak when growth was measured last; 0: it is measured after the next run
    outgrown_bytes: int = 0  # growth that its plans had no room for
    accepted_bytes: int = 0  # in a compressed tier, for which no plan was found that takes less
    host_of: Plan | None = None  # the plan by whose run the host's time is calibrated

    def after_run(self, *, is_steady: bool) -> History:
        """Return it after one more run; only a run that ``is_steady`` shows seconds, and advances the phase."""
        if self.phase is Phase.FINAL:
            return self
        is_cold = self.phase is Phase.TRACED and self.num_runs + 1 < _WARM_UP_RUNS
        phase = self.phase if is_cold or not is_steady else Phase(self.phase + 1)
        return replace(self, phase=phase, num_runs=self.num_runs + 1)


NO_HISTORY = History()


@dataclass(frozen=True)
class PlannedStep(CachedPlan):
    """One or more graphs that run as one step, and the plan they follow."""

    graphs: tuple[int, ...]
    merged: MergedPrograms
    allowance: Allowance
    made_with: Allowance  # the allowance when the plan was activated
    origin: str  # of the plan: "made in 1.2 s", "from cache"
    places: ArenaLayout | None = None  # offsets of its tensors, with an arena
    is_overdrawn: bool = False  # exceeds its allowance, and no plan was found that does not
    history: History = NO_HISTORY

    @cached_property
    def predicted(self) -> Timeline:
        """The timeline that its history lets expect, simulated when it is first read."""
        return simulate(
            self.merged.program,
            self.allowance.room.with_held(self.merged.program, self.costs),
            self.machine,
            self.plan,
            min_counted_bytes=self.history.min_counted_bytes,
            released=self.history.released,
        )

    @property
    def moves(self) -> bool:
        """Whether its plan swaps or recomputes anything."""
        return self.plan.moves

    @property
    def excess_bytes(self) -> int:
        """Bytes by which its plan exceeds the allowance."""
        return self.tensor_peak_bytes - self.allowance.step_bytes

    @property
    def is_over_budget(self) -> bool:
        """Whether its plan exceeds the budget even without a margin."""
        return self.excess_bytes > self.allowance.margin_bytes

    @property
    def tensor_peak_bytes(self) -> int:
        """The planned peak of its own tensors, fragmentation included if they have offsets."""
        return max(self.plan.predicted_peak_bytes, self.places.total_bytes if self.places else 0)

    @property
    def slack_bytes(self) -> int:
        """Growth that is no cause to replan: where no plan fits, less would change nothing."""
        return GROWTH_BYTES if self.is_overdrawn else self.allowance.slack_bytes

    @property
    def is_outgrown(self) -> bool:
        """Whether the excess is large enough to replan, and a smaller plan is not known to be impossible."""
        return self.excess_bytes > self.slack_bytes and not self.is_overdrawn

    def small_bytes(self, from_bytes: int) -> int:
        """Return the peak of all buffers smaller than ``from_bytes``."""
        program, costs = self.merged.program, self.costs
        small_curve = StepMemory(program, costs).curve - StepMemory(program, costs, from_bytes).curve
        return int(small_curve.max(initial=0))

    @property
    def adds_up(self) -> bool:
        """Whether each gradient is accumulated as it is computed, into those of the steps before."""
        return self.merged.program.kind_of_gradients is BufferKind.ACCUMULATED_GRADIENT

    def runs_as(self, other: PlannedStep) -> bool:
        """Whether graphs compiled for ``other`` serve it: the same actions, offsets and handling of gradients."""
        return self.adds_up == other.adds_up and self.plan.acts_as(other.plan) and self.places == other.places

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The graphs in the planned order of their backwards."""
        return tuple(self.graphs[s.graph] for s in self.merged.program.segments if s.phase == "backward")
