"""Which plan does a step follow? A remembered one, a new one, or one that its first steps showed to be better."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

import lmswap
from lmswap.analyze.memory import StepMemory
from lmswap.capture.join import Joined
from lmswap.capture.loss import LossMeter, loss_bytes, without_losses
from lmswap.errors import PlanInfeasible, PlanMismatch, TierError
from lmswap.execute.engine import SwapEngine
from lmswap.hardware.memory import DeviceMemory
from lmswap.hardware.node import Node, num_local_processes
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.places import Places
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.timeline import Timeline
from lmswap.options import Options
from lmswap.plan import make_plan, price_again, simulate
from lmswap.plan.cache import PlanCache, Planned
from lmswap.plan.feedback import Feedback, compare
from lmswap.plan.gaps import plan_between_gaps
from lmswap.plan.places import find_places
from lmswap.reporting.text import format_seconds
from lmswap.session.allowance import GROWTH_BYTES, Allowance, Budget
from lmswap.session.notes import Notes
from lmswap.session.pinned import PinnedPlans

_log = logging.getLogger(__name__)

# After the first steps "auto" searches for as many times as long as before them, once: for a plan that is made again,
# and for one that by what was measured may be slower than the best by more than this share. A gain of less is none.
_SECOND_EFFORT = 4
_WORTH_SEARCHING = 0.01
# What planning between steps takes from a CPU's budget: 30 MiB at 406 ops, 22 at 2,071, 74 at 50,351.
_PLANNING_BYTES, _PLANNING_BYTES_PER_OP = 32 * 2**20, 1024
# Origins of plans.
_FROM_CACHE, _FROM_OTHER_RANK = "from cache", "made by another rank of this machine"


@dataclass(frozen=True)
class PlannedStep:
    """One or more graphs that run as one step, and the plan they follow."""

    graphs: tuple[int, ...]
    joined: Joined
    costs: OpCosts
    machine: Machine
    plan: Plan
    predicted: Timeline
    allowance: Allowance
    origin: str  # of the plan: "made in 1.2 s", "from cache"
    segment_seconds: tuple[float, ...] = ()  # see `keep`
    host_seconds: tuple[float | None, ...] = ()  # the same
    released: frozenset[int] = frozenset()
    places: Places | None = None  # where its tensors lie, with an arena

    @property
    def backwards(self) -> tuple[int, ...]:
        """The graphs in the order in which their backwards are planned to run."""
        return tuple(self.graphs[s.graph] for s in self.joined.program.segments if s.phase == "backward")


class StepPlans:
    """The plans that a model's steps follow, by the graphs that run in a step, in forward order."""

    def __init__(
        self,
        options: Options,
        machine: Machine,
        tier: str,
        *,
        engine: SwapEngine,
        memory: DeviceMemory,
        budget: Budget,
        losses: LossMeter,
        notes: Notes,
        pinned: PinnedPlans | None,
        node: Node | None,
    ) -> None:
        """``notes`` is where sentences for people go. Tensors get places in the arena of ``engine``, if it has one.

        With ``pinned`` plans these are followed, and no others are made. Else the first plan of a step is that of the
        first rank of ``node`` that asks for it.
        """
        self._options, self._machine, self._tier = options, machine, tier
        self._engine, self._memory, self._budget, self._notes = engine, memory, budget, notes
        self._losses, self._pinned, self._node = losses, pinned, node
        self._held_over = {BufferKind.OUTPUT}  # what the caller still has of a step when the next one begins
        self._placed: tuple[Plan, Places] | None = None  # the last plan that places were found for
        self._steps: dict[tuple[int, ...], PlannedStep] = {}
        self._outgrown: set[tuple[int, ...]] = set()  # steps that were planned again for what others hold
        self._cache = PlanCache(
            machine,
            {
                "lmswap": lmswap.__version__,
                "torch": torch.__version__,
                "policy": options.policy,
                "compiler": options.compiler,
                "budget": options.budget_bytes,
                "emulated": asdict(replace(options.link, shared_file=None)) if options.link else None,
                "is_shared": options.link is not None and options.link.shared_file is not None,
            },
            tier=tier,
            min_swap_bytes=options.min_swap_bytes,
        )

    def __getitem__(self, graphs: tuple[int, ...]) -> PlannedStep:
        return self._steps[graphs]

    def get(self, graphs: tuple[int, ...]) -> PlannedStep | None:
        """The step of these graphs, if it is planned."""
        return self._steps.get(graphs)

    def newest(self, among: Callable[[PlannedStep], bool] = lambda _: True) -> PlannedStep | None:
        """The step that was planned last, ``among`` some or all of them."""
        return next(filter(among, reversed(self._steps.values())), None)

    def remembered(self, program: Program) -> Planned | None:
        """What an earlier process planned for ``program``.

        Raises:
            PlanMismatch: it is not in the file that is to be followed.
        """
        return self._cache.read(program) if self._pinned is None else self._pinned.find(program)

    def in_force(self) -> tuple[tuple[Program, Planned], ...]:
        """The steps that are planned, priced and certified by what is known now."""
        return tuple((step.joined.program, self._priced(step)) for step in self._steps.values())

    def make(
        self, graphs: tuple[int, ...], joined: Joined, costs: OpCosts, known: Planned | None = None
    ) -> PlannedStep:
        """Puts a plan in force: the ``known`` one if it still serves, else a new one from what is known, or ``costs``.

        Raises:
            PlanInfeasible: no plan fits the budget.
            PlanMismatch: the pinned plan does not.
        """
        allowance = self._budget.allowance(joined.program)
        if known is not None and self._pinned is not None:
            self._refuse_outgrown(known, joined.program, allowance)
            return self._adopt(graphs, joined, known, allowance, f"that of '{self._options.plan}'")
        if known is not None and self._serves(known, joined.program, allowance):
            return self._adopt(graphs, joined, known, allowance, _FROM_CACHE)
        costs, machine = (known.costs, known.machine) if known else (costs, self._machine)
        costs = self._with_losses(costs, joined.program, graphs)

        def plan() -> Planned:
            return Planned(*self._plan_first(graphs, joined.program, costs, machine, allowance), machine)

        started = time.perf_counter()
        planned, is_own = self._plan_together(joined.program, allowance, plan) if known is None else (plan(), True)
        seconds = time.perf_counter() - started
        self._cache.write(joined.program, planned)
        origin = f"made in {format_seconds(seconds)}" if is_own else _FROM_OTHER_RANK
        return self._adopt(graphs, joined, planned, allowance, origin)

    def swap_all(self, graphs: tuple[int, ...], joined: Joined, costs: OpCosts) -> PlannedStep:
        """Puts a plan in force that swaps all it can, for a step that no plan fits."""
        allowance = self._budget.allowance(joined.program)
        plan = self._search(joined.program, costs, self._machine, allowance, "swap_all", budget_bytes=2**62)
        return self._adopt(graphs, joined, Planned(plan, costs, self._machine), allowance, "swaps whatever it can")

    def heed_losses(self, step: PlannedStep) -> bool:
        """Plans again if what the loss takes, which is known after one step, does not fit; whether it is another plan.

        Until then it is what was assumed or remembered.
        """
        program = step.joined.program
        costs = self._with_losses(step.costs, program, step.graphs)
        if costs == step.costs:
            return False
        heeding = replace(step, costs=costs)
        peak_bytes = simulate(program, costs, step.machine, step.plan).peak_bytes
        if peak_bytes <= step.plan.budget_bytes:
            self._predict(replace(heeding, plan=replace(step.plan, predicted_peak_bytes=peak_bytes)))
            return False
        self._lend_memory(program)
        taken = format_bytes(loss_bytes(costs, program))
        return self._make_again(heeding, f"the loss takes {taken}, more than the plan leaves it", remembers=True)

    def _serves(self, known: Planned, program: Program, allowance: Allowance) -> bool:
        placed_bytes = self._placed_bytes(program, known.costs, known.plan)
        return known.serves(allowance.step_bytes, GROWTH_BYTES) and placed_bytes <= allowance.step_bytes + GROWTH_BYTES

    def _refuse_outgrown(self, pinned: Planned, program: Program, allowance: Allowance) -> None:
        """A pinned plan may use the margin, as what is in use before a step differs from start to start."""
        plan = pinned.plan
        if plan.budget_bytes > allowance.budget_bytes:
            return  # of a graph that is served until all graphs of its step are known
        step_bytes = max(plan.predicted_peak_bytes, self._placed_bytes(program, pinned.costs, plan))
        before_bytes = allowance.base_bytes + allowance.reserve_bytes
        if before_bytes + step_bytes > allowance.budget_bytes:
            raise PlanMismatch(
                f"plan '{self._options.plan}' takes {format_bytes(step_bytes)} for the step's tensors, and "
                f"{format_bytes(before_bytes)} are in use before the step and reserved: more than the budget of "
                f"{format_bytes(allowance.budget_bytes)}"
            )

    def _plan_together(
        self, program: Program, allowance: Allowance, plan: Callable[[], Planned]
    ) -> tuple[Planned, bool]:
        """What ``plan`` makes, or the first rank of this machine that planned the same step did; whether it is own.

        Nobody waits but for a plan that is being made: which steps other ranks will come to is not known.
        """
        if self._node is None:
            return plan(), True
        own: list[Planned] = []

        def tell() -> bytes:
            own.append(plan())
            return self._cache.pack(own[0])

        told = self._node.once(self._cache.name(program), tell)
        if own:
            return own[0], True
        planned = self._cache.unpack(program, told) if told else None
        if planned is not None and self._serves(planned, program, allowance):
            return planned, False
        return plan(), True

    def _with_losses(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        if self._engine.arena is not None:
            return without_losses(costs, program)
        return self._losses.as_seen(costs, program, graphs)

    def make_room(self, step: PlannedStep) -> bool:
        """Plans again, once, when tensors outside of the step hold more than planned; whether its plan is another."""
        more_bytes = self._budget.outgrown_bytes(step.allowance)
        if more_bytes <= GROWTH_BYTES or step.graphs in self._outgrown:
            return False
        self._outgrown.add(step.graphs)
        self._lend_memory(step.joined.program)
        held = f"{format_bytes(more_bytes)} more are held between steps than was planned for"
        return self._make_again(replace(step, allowance=step.allowance.with_held(more_bytes)), held)

    def heed_unplaced(self, step: PlannedStep) -> bool:
        """Gives gradients places of their own, once, when some were still there where another tensor was to lie.

        Whether the step's plan or places are others then.
        """
        arena = self._engine.arena
        if arena is None or arena.num_unplaced == 0 or BufferKind.GRADIENT in self._held_over:
            return False
        self._held_over.add(BufferKind.GRADIENT)
        self._placed = None
        self._make_again(step, "gradients of a step are still held when the next one begins")
        return self._steps[step.graphs].places != step.places

    def keep(self, step: PlannedStep, released: frozenset[int]) -> None:
        """Notes what the last step took, as the ops of the next one will be timed, and what was let go of.

        ``released`` are the outputs and tangents that the caller did not hold; predictions count on that, plans do not.
        """
        record = self._engine.recorder.last()
        seconds = () if record is None else tuple(map(sum, record.op_seconds()))
        of_host = () if record is None else record.host_seconds()
        self._steps[step.graphs] = replace(step, segment_seconds=seconds, host_seconds=of_host, released=released)

    def learn(self, step: PlannedStep) -> bool:
        """Predicts from what the last step took, and plans again if the prediction was off, or the plan may be slow.

        Says whether the plan of ``step`` is another then. What is in use between steps is known from now on.
        """
        self._memory.tidy()  # tracing and timing leave up to 30 MiB, which steps would not use again
        step = self._with_growth(step, _small_bytes(step, self._memory.counted_from_bytes()))
        if self._pinned is not None:
            return False
        record = self._engine.recorder.last()
        if record is None:
            return False
        program = step.joined.program
        found = compare(
            program,
            step.costs,
            step.machine,
            step.plan,
            tier=self._tier,
            predicted=step.predicted,
            measured=record.timeline(program.buffer_names, other_bytes=0),
            op_seconds=_without_marks(record.op_seconds(), step.segment_seconds),
            host_seconds=step.host_seconds,
        )
        if found is None:
            return False
        self._lend_memory(program)
        step = self._price_again(replace(step, costs=found.costs, machine=found.machine))
        if found.is_off:
            return self._make_again(step, _describe(found, program), remembers=True)
        if self._is_outgrown(step):
            return self._make_again(step, _describe_growth(step), remembers=True)
        return self._search_on(step)

    def settle(self, step: PlannedStep) -> bool:
        """Reads again what is in use between steps: a new plan's graphs are compiled, what searching left is used up.

        Whether the plan had to be made again for that, and is another.
        """
        step = self._with_growth(step, small_bytes=0)  # the last step has left them in use
        if not self._is_outgrown(step):
            return False
        self._lend_memory(step.joined.program)
        return self._make_again(step, _describe_growth(step), remembers=True)

    def _with_growth(self, step: PlannedStep, small_bytes: int) -> PlannedStep:
        """``step`` with what is in use between steps now, the places of small tensors included."""
        ended = self._engine.recorder.ended
        peak_bytes = ended.peaks.used_bytes if ended is not None else 0
        return self._predict(replace(step, allowance=self._budget.with_growth(step.allowance, small_bytes, peak_bytes)))

    def _price_again(self, step: PlannedStep) -> PlannedStep:
        """``step``, whose plan was made by other costs, with a prediction by its own."""
        priced = self._priced(step)
        self._memory.tidy()
        self._cache.write(step.joined.program, priced)
        return self._predict(replace(step, plan=priced.plan))

    def _priced(self, step: PlannedStep) -> Planned:
        program, min_swap_bytes = step.joined.program, self._options.min_swap_bytes
        plan = price_again(step.plan, program, step.costs, step.machine, tier=self._tier, min_swap_bytes=min_swap_bytes)
        return Planned(plan, step.costs, step.machine)

    def _predict(self, step: PlannedStep) -> PlannedStep:
        """``step`` with its timeline, which leaves out what is read as in use between steps."""
        predicted = simulate(
            step.joined.program,
            step.costs,
            step.machine,
            step.plan,
            counted_from_bytes=self._memory.counted_from_bytes(),
            released=step.released,
        )
        found = self._steps[step.graphs] = replace(step, predicted=predicted)
        return found

    @staticmethod
    def _is_outgrown(step: PlannedStep) -> bool:
        placed_bytes = step.places.total_bytes if step.places else 0
        return max(step.plan.predicted_peak_bytes, placed_bytes) > step.allowance.step_bytes + GROWTH_BYTES

    def _search_on(self, step: PlannedStep) -> bool:
        """Searches for longer where the plan may not be the best by what was measured."""
        if self._options.policy != "auto" or step.origin == _FROM_CACHE or step.plan.certificate is None:
            return False
        excess = step.plan.predicted_seconds / step.plan.certificate.seconds - 1
        if excess <= _WORTH_SEARCHING:
            return False
        reason = f"the plan was {excess:.1%} above the best possible, and a longer search found a faster one"
        most_seconds = (1 - _WORTH_SEARCHING) * step.plan.predicted_seconds
        return self._make_again(step, reason, most_seconds=most_seconds, remembers=True)

    def _make_again(
        self, step: PlannedStep, reason: str, *, most_seconds: float = math.inf, remembers: bool = False
    ) -> bool:
        """Puts a new plan in the place of ``step``'s, by its costs, machine and allowance, and says so.

        Only if there is one that takes ``most_seconds``; whether it is another plan.
        """
        reason = f"after step {self._engine.recorder.num_steps}: {reason}"
        if self._pinned is not None:
            self._notes.append(f"the plan stays that of '{self._options.plan}' {reason}")
            return False
        program, policy = step.joined.program, self._options.policy
        try:
            plan = self._search(program, step.costs, step.machine, step.allowance, policy, effort=_SECOND_EFFORT)
        except (PlanInfeasible, TierError) as error:
            self._notes.append(f"the plan stays as it was {reason}; {error}")
            self._steps[step.graphs] = replace(step, allowance=replace(step.allowance, scattered_bytes=0))
            return False
        if plan.predicted_seconds > most_seconds:
            return False
        planned = Planned(plan, step.costs, step.machine)
        adopted = self._adopt(step.graphs, step.joined, planned, step.allowance, f"made again {reason}")
        self._steps[step.graphs] = replace(adopted, released=step.released)
        if remembers:
            self._cache.write(program, planned)
        is_same = (plan.swaps, plan.reruns) == (step.plan.swaps, step.plan.reruns)
        if not is_same:
            self._memory.trim()  # what the old plan's steps held at most may be more than the new one's will
        self._notes.append(f"replanned {reason}" + ("; the plan is the same" if is_same else ""))
        return not is_same

    def _plan_first(
        self, graphs: tuple[int, ...], program: Program, costs: OpCosts, machine: Machine, allowance: Allowance
    ) -> tuple[Plan, OpCosts]:
        """A plan, and the costs that it was made by: what a loss may take is no reason to refuse a budget."""
        policy = self._options.policy
        try:
            return self._search(program, costs, machine, allowance, policy), costs
        except PlanInfeasible:
            lean = self._losses.unassumed(costs, program, graphs)
            if lean == costs:
                raise
        plan = self._search(program, lean, machine, allowance, policy)
        assumed = format_bytes(loss_bytes(costs, program))
        self._notes.append(f"the budget leaves less than {assumed} to the loss: one that takes as much exceeds it")
        return plan, lean

    def _lend_memory(self, program: Program) -> None:
        """Makes sure that planning does not come on top of what steps keep for reuse."""
        self._memory.lend(_PLANNING_BYTES + _PLANNING_BYTES_PER_OP * len(program.ops))

    def _search(
        self,
        program: Program,
        costs: OpCosts,
        machine: Machine,
        allowance: Allowance,
        policy: str,
        *,
        budget_bytes: int | None = None,
        effort: int = 1,
    ) -> Plan:
        parameters = {"effort": effort} if policy == "auto" else {}

        def plan_within(most_bytes: int) -> Plan:
            return make_plan(
                policy,
                program,
                costs,
                machine,
                budget_bytes=most_bytes,
                tier=self._tier,
                min_swap_bytes=self._options.min_swap_bytes,
                **parameters,
            )

        most_bytes = budget_bytes or allowance.step_bytes
        try:
            return plan_between_gaps(plan_within, lambda plan: self._placed_bytes(program, costs, plan), most_bytes)
        except PlanInfeasible as error:  # in the planner's words the budget is the step's share: say it in the user's
            raise PlanInfeasible(
                budget_bytes=allowance.budget_bytes,
                needed_bytes=error.needed_bytes + allowance.fixed_bytes,
                where=error.where,
                live=(*error.live[:4], ("in use before the step and reserved", allowance.fixed_bytes)),
                policy=policy,
            ) from None
        except TierError as error:
            count = num_local_processes()
            if self._tier != "host" or count == 1 or self._options.host_budget_bytes is not None:
                raise
            share = f"LOCAL_WORLD_SIZE is {count}: each of these processes may pin 1/{count} of what all of them may"
            raise TierError(f"{error}. {share}; host_budget sets it otherwise") from None
        finally:
            self._memory.tidy()

    def _placed_bytes(self, program: Program, costs: OpCosts, plan: Plan) -> int:
        """What the step of ``plan`` takes where its tensors have places; 0 where they have none."""
        places = self._find_places(program, costs, plan)
        return places.total_bytes if places is not None else 0

    def _find_places(self, program: Program, costs: OpCosts, plan: Plan) -> Places | None:
        """Where the tensors of ``plan``'s step lie; asked twice for a plan that is adopted, found once."""
        if self._engine.arena is None:
            return None
        if self._placed is None or self._placed[0] is not plan:
            self._placed = plan, find_places(program, costs, plan, held_over=self._held_over)
        return self._placed[1]

    def _reserve(self, tier: str, nbytes: int) -> None:
        """Makes room for a plan before its step runs: pinning takes a second for some GiB."""
        before = self._engine.native.tier_stats(tier)
        self._engine.native.reserve(tier, nbytes)
        after = self._engine.native.tier_stats(tier)
        if after.reserve_seconds > before.reserve_seconds:
            _log.info(
                "reserved the %s tier in %s: %s, before %s",
                tier,
                format_seconds(after.reserve_seconds - before.reserve_seconds),
                format_bytes(after.capacity_bytes),
                format_bytes(before.capacity_bytes),
            )

    def _adopt(
        self, graphs: tuple[int, ...], joined: Joined, planned: Planned, allowance: Allowance, origin: str
    ) -> PlannedStep:
        plan, costs, machine = planned.plan, planned.costs, planned.machine
        for tier, nbytes in plan.tier_bytes.items():
            self._reserve(tier, nbytes)
        predicted = simulate(joined.program, costs, machine, plan)
        places = self._find_places(joined.program, costs, plan)
        step = PlannedStep(graphs, joined, costs, machine, plan, predicted, allowance, origin, places=places)
        self._steps[graphs] = step
        if self._engine.arena is not None:
            self._engine.arena.resize(max(known.places.arena_bytes for known in self._steps.values() if known.places))
        _log.info(
            "planned the step of graphs %s, %s: %d of %d buffers swapped, %d ops run again, peak %s of a budget of %s",
            ", ".join(map(str, graphs)),
            origin,
            len({swap.buffer for swap in plan.swaps}),
            len(joined.program.buffers),
            len(plan.reruns),
            format_bytes(plan.predicted_peak_bytes + allowance.base_bytes + allowance.reserve_bytes),
            format_bytes(allowance.budget_bytes),
        )
        return step


def _small_bytes(step: PlannedStep, from_bytes: int) -> int:
    """The most that buffers of less than ``from_bytes`` hold together in a step."""
    program, costs = step.joined.program, step.costs
    small_curve = StepMemory(program, costs).curve - StepMemory(program, costs, from_bytes).curve
    return int(small_curve.max(initial=0))


def _without_marks(
    op_seconds: Sequence[Sequence[float]], segment_seconds: Sequence[float]
) -> Sequence[Sequence[float]]:
    """``op_seconds``, scaled where their segment took less in the step before, whose ops were not timed.

    Marks between ops take time; memory that was touched for the first time did in the step before.
    """
    if len(segment_seconds) != len(op_seconds):
        return op_seconds
    found = []
    for ops, before in zip(op_seconds, segment_seconds, strict=True):
        scale = min(1.0, before / sum(ops)) if any(ops) else 1.0
        found.append([scale * seconds for seconds in ops])
    return found


def _describe_growth(step: PlannedStep) -> str:
    if step.allowance.scattered_bytes:
        return f"tensors lay so scattered that the step took {format_bytes(step.allowance.scattered_bytes)} too much"
    return f"{format_bytes(step.allowance.grown_bytes)} more are in use between steps than was planned for"


def _describe(found: Feedback, program: Program) -> str:
    """By how much the prediction was off, and which op most."""
    measured, predicted = format_seconds(found.measured_seconds), format_seconds(found.predicted_seconds)
    worst, op = found.worst, program.ops[found.worst.op]
    where = f"'{op.name}'" + (f" ({op.source})" if op.source else "")
    took = f"{format_seconds(worst.measured_seconds)} against {format_seconds(worst.predicted_seconds)}"
    host = f"; the device waited for the host, which took {format_seconds(found.host_seconds)} to queue its work"
    most = host if found.host_seconds > worst.error_seconds else f"; most off is op {where}: {took}"
    return f"measured {measured} against {predicted} predicted{most}"
