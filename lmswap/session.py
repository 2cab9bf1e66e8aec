"""Everything that belongs to one enabled model: here the stages meet.

torch hands over one graph after another (graph breaks, shapes, train and eval make several); each is lowered, timed,
planned and rewritten before it runs. When a step turns out to run through several graphs they are planned anew, as one
timeline, before the next step; when it takes another time than predicted, or finds more memory in use, it is planned
once more.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import SkipFrame
from torch._guards import TracingContext, tracing

import lmswap
from lmswap.analyze.cost import roofline
from lmswap.capture import aot
from lmswap.capture.aot import without_hooks
from lmswap.capture.join import Joined, graph_plan, join
from lmswap.capture.lower import Lowered, lower_inference, lower_training
from lmswap.capture.measure import OpMeter
from lmswap.capture.results import input_names, results
from lmswap.eager.actions import PlannedEvents
from lmswap.eager.recording import Recorded, lower_recorded
from lmswap.errors import CaptureError, LmswapError, OptionError, PlanInfeasible, TierError
from lmswap.execute import _C
from lmswap.execute.audit import Audit
from lmswap.execute.engine import SwapEngine
from lmswap.execute.graph import BoxedFunction, compile_boxed, copy_graph
from lmswap.execute.reference import REFERENCE, Reference
from lmswap.execute.tiers import open_tier
from lmswap.hardware.disk import swap_directory
from lmswap.hardware.measure import describe_machine
from lmswap.hardware.memory import DeviceMemory, device_memory
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Timeline
from lmswap.ir.verified import Verified
from lmswap.options import Options
from lmswap.plan import make_plan, simulate
from lmswap.plan.cache import PlanCache, Planned
from lmswap.plan.feedback import compare
from lmswap.reporting.text import format_seconds
from lmswap.rewrite.insert import insert_swaps
from lmswap.rewrite.rerun import run_again

_log = logging.getLogger(__name__)

# Kept free beside the plan: what the process grows by between planning and the end of the first steps (generated code,
# kernels' own caches) and what allocators round up.
_MARGIN_BYTES = {"cpu": 64 * 2**20, "cuda": 32 * 2**20}
# What is in use before the step may exceed what was planned for before it is planned again: a part of the margin.
_GROWTH_BYTES = 8 * 2**20
# In records, the place of a graph's number for a step that no plan was made for.
UNPLANNED = -1
# Earlier steps touch their memory for the first time, and choose algorithms.
_STEADY_STEP = 3
# After the first steps "auto" searches for as many times as long as before them, once: for a plan that is made again,
# and for one that may be slower than the best by more than this share, and by more than the prediction was off.
_SECOND_EFFORT = 4
_WORTH_SEARCHING = 0.01
_FROM_CACHE = "from cache"  # the origin of a plan
# Of what is free, "auto" leaves a part to whatever else uses the device.
_AUTO_SHARE = 0.9


# What verify=True does and leaves, by what runs the model.
WHAT_VERIFY_DOES = {
    "fx": "verify=True: each graph also runs without swaps, beside the budget, which is not kept; its copies and "
    "checks are part of the measured times",
    "inductor": "verify=True checks the transfers only: a step that Inductor compiles without copies in it may fuse "
    "otherwise, and differ in the last bits; compiler='fx' compares results too",
    "eager": "verify=True: under saved-tensor hooks the model's own code runs, once; what it saves is kept in "
    "main memory too, beside the budget, and compared to the bit with what the backward takes back: no more can differ",
}


@dataclass(frozen=True)
class Allowance:
    """How a budget is spent: what is there before the step, what will come outside of it, and what the step may use."""

    budget_bytes: int
    base_bytes: int
    tensor_bytes: int  # the part of base_bytes that tensors hold
    reserve_bytes: int
    margin_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What the step's own tensors may not occupy."""
        return self.base_bytes + self.reserve_bytes + self.margin_bytes

    @property
    def step_bytes(self) -> int:
        """What the step's own tensors may occupy."""
        return self.budget_bytes - self.fixed_bytes


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


class Session:
    """An enabled model's engine, graphs, plans and records. Dynamo calls it with each graph that it captures."""

    def __init__(self, name: str, options: Options, device: torch.device, trainable_bytes: int) -> None:
        """Opens the engine and its tier.

        Raises:
            OptionError: the budget or the tier cannot be had on ``device``.
            TierError: the tier's memory or directory cannot be used.
        """
        self.name, self.options, self.device = name, options, device
        self.tier = _resolve_tier(options.tier, device)
        self._trainable_bytes = trainable_bytes
        machine = describe_machine(device, self.tier, options.disk_directory)
        self.machine: Machine = _as_asked(machine, self.tier, options)
        native = _open_engine(device, self.tier, self.machine, options)
        self.memory: DeviceMemory = device_memory(device)
        self.verified = Verified(name) if options.verify else None
        audit = Audit(native, self.verified, self._describe) if self.verified else None
        self.engine = SwapEngine(device, native, self.memory.used_tensor_bytes, audit=audit)
        self.recorder = self.engine.recorder
        try:
            self.budget_bytes = _resolve_budget(options, self.memory)
        except OptionError:
            self.close()
            raise
        self.graphs: list[CapturedGraph | SavedSequence] = []
        self.steps: dict[tuple[int, ...], PlannedStep] = {}  # by the graphs that run in it, in forward order
        self.notes: list[str] = []
        if options.budget_bytes is None:
            left = f"what was free when the model was enabled, less {1 - _AUTO_SHARE:.0%} for others"
            self.notes.append(f"budget 'auto' is {format_bytes(self.budget_bytes)}: {left}")
        if options.verify:
            self.notes.append(WHAT_VERIFY_DOES[options.compiler])
        self._plans = PlanCache(
            self.machine,
            {
                "lmswap": lmswap.__version__,
                "torch": torch.__version__,
                "policy": options.policy,
                "compiler": options.compiler,
                "budget": options.budget_bytes,
                "emulated": asdict(replace(options.link, shared_file=None)) if options.link else None,
                "is_shared": options.link is not None and options.link.shared_file is not None,
            },
            tier=self.tier,
            min_swap_bytes=options.min_swap_bytes,
        )
        self.runs_uncaptured = False  # code whose graph cannot be planned for; somebody serves what it saves
        self._num_runs: Counter[tuple[int, ...]] = Counter()  # by step, before the one under way
        self._forwards: tuple[int, ...] = ()  # of the step before the last
        self._outgrown: set[tuple[int, ...]] = set()  # steps that were planned again for what others hold
        self._has_trained = False
        self.meter = OpMeter(device, self.memory, lambda program: roofline(program, self.machine))

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend: takes one graph, gives what runs instead of it."""
        graph = CapturedGraph(self, len(self.graphs), module)
        self.graphs.append(graph)
        try:
            with without_hooks():
                graph.compile(inputs)
        except Exception as error:
            if not self.runs_uncaptured or (isinstance(error, LmswapError) and not isinstance(error, CaptureError)):
                raise
            self.graphs.remove(graph)
            self.notes.append(f"a graph could not be planned for: {type(error).__name__}: {error}")
            _log.warning("%s: %s", self.name, self.notes[-1])
            # As text: a handler that keeps records would keep the frames, and so the tensors, of the first step.
            _log.debug("%s", "".join(traceback.format_exception(error)))
            # Dynamo then runs the user's own code; its graph may be no substitute for that.
            raise SkipFrame(self.notes[-1]) from error

        def run(*arguments: Any) -> Any:
            with without_hooks():
                self.prepare(graph)
                return graph.due().function(*arguments)

        return run

    def plan_recorded(self, recorded: Recorded) -> SavedSequence:
        """Plans a step that was recorded by saved-tensor hooks.

        Raises:
            PlanInfeasible: no plan fits the budget.
        """
        sequence = SavedSequence(self, len(self.graphs), recorded)
        self.graphs.append(sequence)
        self._has_trained = True
        try:
            self._plan((sequence.index,), self._plans.read(sequence.program))
        except (PlanInfeasible, TierError):
            self.graphs.remove(sequence)
            raise
        self._compile((sequence.index,))
        return sequence

    def plan_alone(self, graph: CapturedGraph, lowered: Lowered) -> Plan:
        """Plans a graph that was just captured, with what the device has left at this moment."""
        known = self._plans.read(lowered.program)
        graph.costs = known.costs if known else self.meter.costs(lowered.program, lowered.graphs)
        follows_others = any(key[1] == "forward" for key in self.recorder.current_sequence)
        try:
            step = self._plan((graph.index,), known)
        except PlanInfeasible:
            if not follows_others:
                raise
            # What earlier graphs of this step hold was planned before this one was known; from the next step on all
            # of them share one plan, which fits or says why not.
            step = self._plan((graph.index,), None, policy="swap_all", budget_bytes=2**62)
            self.notes.append(
                f"graph {graph.index} was found after graph {graph.index - 1} had been planned: the first step "
                "could not keep to the budget"
            )
        return graph_plan(step.joined, step.plan, 0, lowered.program)

    def prepare(self, graph: CapturedGraph | SavedSequence | None) -> None:
        """Called before a graph runs forward: plans anew what the last step showed to be otherwise than planned.

        None stands for a step that has no plan.
        """
        self.engine.sweep()
        self.recorder.end_if_complete()
        if self.recorder.current_sequence or graph is None:
            return
        ran = self.recorder.last_sequence
        forwards = tuple(index for index, phase in ran if phase == "forward")
        backwards = tuple(index for index, phase in ran if phase == "backward")
        self._has_trained |= bool(backwards)
        is_chain = len(forwards) > 1 and backwards == forwards[::-1] and isinstance(graph, CapturedGraph)
        repeated = [index for index, count in Counter(forwards).items() if count > 1 and index in backwards]
        # A step that runs a graph several times may run it another number of times next: it is planned when it recurs.
        has_settled, self._forwards = not repeated or forwards == self._forwards, forwards
        if is_chain and has_settled and graph.index == forwards[0] and forwards not in self.steps:
            chain = self._runs(forwards)
            self._plan(chain, self._plans.read(join([self.graphs[index].program for index in chain]).program))
            self._compile(chain)
            return
        if repeated and not is_chain:
            self._note_repeated(repeated[0], forwards.count(repeated[0]))
        step = self.steps.get(self._last_graphs())
        if step is not None and step.graphs[0] == graph.index:
            self._num_runs[step.graphs] += 1
            self._make_room(step)
            # Checks take time of their own.
            if self._num_runs[step.graphs] == _STEADY_STEP and not repeated and not self.options.verify:
                self._learn(self.steps[step.graphs])

    def current_step(self) -> PlannedStep | None:
        """The plan of the last step that ran, or of the first that will; None if the last one ran without."""
        ran = self._last_graphs()
        if UNPLANNED in ran:
            return None
        return self.steps.get(ran) or next(reversed(self.steps.values()), None)

    def _describe(self, number: int) -> tuple[str, str]:
        """What people call the buffer that is moved under ``number``, and the op that makes it."""
        ran = {graph for graph, _ in self.recorder.current_sequence}
        step = next((step for step in reversed(self.steps.values()) if ran <= {*step.graphs}), None)
        if step is None:
            return str(number), "a step without a plan"
        program = step.joined.program
        op = next((op for op in program.ops if number in op.writes), None)
        made_by = f"op '{op.name}' ({', '.join(filter(None, (op.target, op.source)))})" if op else "the model's caller"
        return program.buffer_names[number], made_by

    def close(self) -> None:
        """Gives host memory, files and threads back. Idempotent."""
        self.engine.close()
        self.memory.close()

    def _last_graphs(self) -> tuple[int, ...]:
        """The graphs that the last step trained; where it trained none, those that it ran."""
        ran = self.recorder.last_sequence
        trained = [index for index, phase in ran if phase == "forward"]
        return tuple(dict.fromkeys(trained or [index for index, _ in ran]))

    def _runs(self, forwards: Sequence[int]) -> tuple[int, ...]:
        """``forwards`` with a graph for each run: one that runs again is planned and compiled for each run apart."""
        runs: list[int] = []
        for index in forwards:
            graph = self.graphs[index]
            assert isinstance(graph, CapturedGraph)
            number = sum(run in runs for run in (index, *(other.index for other in graph.again)))
            if number > len(graph.again):
                graph.again.append(graph.twin(len(self.graphs)))
                self.graphs.append(graph.again[-1])
            runs.append(index if number == 0 else graph.again[number - 1].index)
        return tuple(runs)

    def _note_repeated(self, index: int, count: int) -> None:
        note = f"graph {index} ran {count} times in a step, and each run is planned as if it were the only one: the "
        note += "step may exceed the budget"
        if note not in self.notes:
            self.notes.append(note)

    def _plan(
        self, indices: tuple[int, ...], known: Planned | None, *, policy: str = "", budget_bytes: int | None = None
    ) -> PlannedStep:
        joined = join([self.graphs[index].program for index in indices])
        allowance = self._allowance(joined.program)
        if known is not None and known.serves(allowance.step_bytes, _GROWTH_BYTES):
            return self._adopt(indices, joined, known, allowance, _FROM_CACHE)
        costs = known.costs if known else _join_costs(joined, [self.graphs[index].costs for index in indices])
        machine = known.machine if known else self.machine
        started = time.perf_counter()
        plan = self._make_plan(
            joined.program, costs, machine, allowance, policy or self.options.policy, budget_bytes=budget_bytes
        )
        origin = f"made in {format_seconds(time.perf_counter() - started)}"
        planned = Planned(plan, costs, machine)
        if not policy:
            self._plans.write(joined.program, planned)
        return self._adopt(indices, joined, planned, allowance, origin)

    def _make_plan(
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
        try:
            return make_plan(
                policy,
                program,
                costs,
                machine,
                budget_bytes=budget_bytes or allowance.step_bytes,
                tier=self.tier,
                min_swap_bytes=self.options.min_swap_bytes,
                **parameters,
            )
        except PlanInfeasible as error:  # in the planner's words the budget is the step's share: say it in the user's
            raise PlanInfeasible(
                budget_bytes=self.budget_bytes,
                needed_bytes=error.needed_bytes + allowance.fixed_bytes,
                where=error.where,
                live=(*error.live[:4], ("in use before the step and reserved", allowance.fixed_bytes)),
                policy=policy,
            ) from None
        finally:
            self.memory.trim()

    def _adopt(
        self, indices: tuple[int, ...], joined: Joined, planned: Planned, allowance: Allowance, origin: str
    ) -> PlannedStep:
        plan, costs, machine = planned.plan, planned.costs, planned.machine
        for tier, nbytes in plan.tier_bytes.items():
            self.engine.native.reserve(tier, nbytes)
        predicted = simulate(joined.program, costs, machine, plan)
        self.steps[indices] = PlannedStep(indices, joined, costs, machine, plan, predicted, allowance, origin)
        return self.steps[indices]

    def _compile(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            self.graphs[index].compile(self.graphs[index].fakes, follows=indices)

    def _make_room(self, step: PlannedStep) -> None:
        """Plans again, once, when tensors outside of the step hold more than planned: gradients kept, averages."""
        planned = step.allowance
        more_bytes = self.memory.used_tensor_bytes() - planned.tensor_bytes - planned.reserve_bytes
        if more_bytes <= _GROWTH_BYTES or step.graphs in self._outgrown:
            return
        self._outgrown.add(step.graphs)
        held = f"{format_bytes(more_bytes)} more are held between steps than was planned for"
        allowance = replace(
            planned, base_bytes=planned.base_bytes + more_bytes, tensor_bytes=planned.tensor_bytes + more_bytes
        )
        self._plan_again(step, step.costs, step.machine, allowance, held)

    def _learn(self, step: PlannedStep) -> None:
        """Plans again from what the last step took, if the prediction was off, or if the plan may not be the best."""
        record = self.recorder.last()
        if record is None:
            return
        program = step.joined.program
        measured = record.timeline(program.buffer_names, other_bytes=0)
        found = compare(
            program, step.costs, step.machine, step.plan, tier=self.tier, predicted=step.predicted, measured=measured
        )
        if found is None:
            return
        if not found.is_off:
            self._search_on(step, found.error)
            return
        took = f"measured {format_seconds(found.measured_seconds)}"
        took += f" against {format_seconds(found.predicted_seconds)} predicted; most off are ops "
        took += f"'{program.ops[found.first_op].name}' to '{program.ops[found.last_op].name}': "
        took += (
            f"{format_seconds(found.worst.measured_seconds)} against {format_seconds(found.worst.predicted_seconds)}"
        )
        if self._plan_again(step, found.costs, found.machine, self._with_growth(step.allowance), took):
            self._remember(step.graphs)

    def _remember(self, graphs: tuple[int, ...]) -> None:
        step = self.steps[graphs]
        self._plans.write(step.joined.program, Planned(step.plan, step.costs, step.machine))

    def _search_on(self, step: PlannedStep, error: float) -> None:
        """Searches for longer where the plan may not be the best; a gain below the prediction's error would be none."""
        excess = step.plan.excess
        if self.options.policy != "auto" or step.origin == _FROM_CACHE:
            return
        least_gain = max(_WORTH_SEARCHING, error)
        if excess is not None and excess > least_gain:
            reason = f"the plan was {excess:.1%} above the best possible, and a longer search found a faster one"
            most_seconds = (1 - least_gain) * step.plan.predicted_seconds
            if self._plan_again(step, step.costs, step.machine, step.allowance, reason, most_seconds=most_seconds):
                self._remember(step.graphs)

    def _with_growth(self, planned: Allowance) -> Allowance:
        """``planned`` and what the process has grown by since beside tensors: the margin is there for what comes."""
        self.memory.trim()
        beside_bytes = self.memory.used_bytes() - self.memory.used_tensor_bytes()
        grown_bytes = max(0, beside_bytes - (planned.base_bytes - planned.tensor_bytes))
        return replace(planned, base_bytes=planned.base_bytes + grown_bytes)

    def _plan_again(
        self,
        step: PlannedStep,
        costs: OpCosts,
        machine: Machine,
        allowance: Allowance,
        reason: str,
        *,
        most_seconds: float = math.inf,
    ) -> bool:
        """Puts a new plan in the place of ``step``'s, if there is one that takes ``most_seconds``, and says so."""
        reason = f"after step {self.recorder.num_steps}: {reason}"
        try:
            policy, effort = self.options.policy, _SECOND_EFFORT
            plan = self._make_plan(step.joined.program, costs, machine, allowance, policy, effort=effort)
        except (PlanInfeasible, TierError) as error:
            self.notes.append(f"the plan stays as it was {reason}; {error}")
            return False
        if plan.predicted_seconds > most_seconds:
            return False
        is_same = (plan.swaps, plan.reruns) == (step.plan.swaps, step.plan.reruns)
        self._adopt(step.graphs, step.joined, Planned(plan, costs, machine), allowance, f"made again {reason}")
        self.notes.append(f"replanned {reason}" + ("; the plan is the same" if is_same else ""))
        if not is_same:
            self._compile(step.graphs)
        return True

    def _allowance(self, program: Program) -> Allowance:
        self.memory.trim()  # timing the ops leaves pages for reuse, which are not part of what is there for good
        base_bytes, tensor_bytes = self.memory.used_bytes(), self.memory.used_tensor_bytes()
        trains = any(segment.phase == "backward" for segment in program.segments)
        margin_bytes = _MARGIN_BYTES[self.device.type]
        # Optimizer state appears after the first backward; two values per parameter is what Adam keeps.
        reserve_bytes = 2 * self._trainable_bytes if trains and not self._has_trained else 0
        allowance = Allowance(self.budget_bytes, base_bytes, tensor_bytes, reserve_bytes, margin_bytes)
        if allowance.step_bytes <= 0:
            raise PlanInfeasible(
                budget_bytes=self.budget_bytes,
                needed_bytes=base_bytes + reserve_bytes + margin_bytes,
                where="the start of the step, before any activation",
                policy=self.options.policy,
                live=(
                    ("already in use", base_bytes),
                    ("optimizer state to come", reserve_bytes),
                    ("margin", margin_bytes),
                ),
            )
        return allowance


class CapturedGraph:
    """One region that Dynamo captured: its compiled function, and what is needed to plan it again."""

    def __init__(self, session: Session, index: int, module: fx.GraphModule) -> None:
        self._session, self.index = session, index
        self._module = copy.deepcopy(module)
        # Real inputs are not kept: they would pin the first batch.
        self.fakes = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        self.program: Program
        self.costs: OpCosts
        self.function: Callable[..., Any]
        self.again: list[CapturedGraph] = []  # for its second and later runs in a step, where those are planned apart
        self._follows: tuple[int, ...] = ()

    def twin(self, index: int) -> CapturedGraph:
        """The same region under another number, to be planned apart."""
        twin = CapturedGraph(self._session, index, self._module)
        twin.program, twin.costs, twin.function = self.program, self.costs, self.function
        return twin

    def due(self) -> CapturedGraph:
        """Whose turn it is when this region runs now: its own, or that of the twin for the next run in the step."""
        ran = {index for index, phase in self._session.recorder.current_sequence if phase == "forward"}
        runs = [self, *self.again]
        return next((run for run in runs if run.index not in ran), self)

    def compile(self, inputs: Sequence[Any], *, follows: tuple[int, ...] = ()) -> None:
        """Compiles the region; with ``follows``, as its part of the plan for that chain of graphs."""
        self._follows = follows
        compile_region = _region_compiler(self._session.options.compiler)
        if follows:
            fake_mode = next(fake.fake_mode for fake in self.fakes if hasattr(fake, "fake_mode"))
            with tracing(TracingContext(fake_mode)):
                self.function = compile_region(copy.deepcopy(self._module), inputs, self)
        else:
            self.function = compile_region(copy.deepcopy(self._module), inputs, self)

    def made(self, node: fx.Node) -> Sequence[torch.Tensor] | None:
        """See `lmswap.capture.aot.GraphHandler`."""
        return self._session.meter.made(node)

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int, parameters: Collection[int]
    ) -> None:
        """See `lmswap.capture.aot.GraphHandler`."""
        name = self._session.name
        self._rewrite(
            lower_training(forward, backward, num_user_outputs=num_user_outputs, parameters=parameters, name=name)
        )

    def inference(self, graph: fx.GraphModule, parameters: Collection[int]) -> None:
        """See `lmswap.capture.aot.GraphHandler`."""
        self._rewrite(lower_inference(graph, parameters=parameters, name=self._session.name))

    def compiled(self, module: fx.GraphModule, phase: str) -> BoxedFunction:
        """See `lmswap.capture.aot.GraphHandler`."""
        run = self.recorded(compile_boxed(module), phase)
        reference: Reference | None = module.meta.get(REFERENCE)
        return reference.beside(run, phase) if reference else run

    def recorded(self, function: BoxedFunction, phase: str) -> BoxedFunction:
        """See `lmswap.capture.inductor.CompiledGraphHandler`."""
        session, index = self._session, self.index

        def run(arguments: list[Any]) -> Any:
            with session.recorder.segment((index, phase)):
                return function(arguments)

        return run

    def _rewrite(self, lowered: Lowered) -> None:
        session = self._session
        self.program = lowered.program
        first_buffer = 0
        if self._follows:
            step, which = session.steps[self._follows], self._follows.index(self.index)
            plan = graph_plan(step.joined, step.plan, which, lowered.program)
            first_buffer = step.joined.buffer_offsets[which]
        else:
            plan = session.plan_alone(self, lowered)
        reference = self._reference(lowered, plan)
        runs, graphs = run_again(lowered.program, lowered.graphs, plan.reruns)
        insert_swaps(runs, graphs, plan, engine=session.engine.number, first_buffer=first_buffer)
        if reference:
            reference.join(graphs)

    def _reference(self, lowered: Lowered, plan: Plan) -> Reference | None:
        """What runs beside the graphs to verify them; None if that was not asked for or ``plan`` changes nothing."""
        session, program = self._session, lowered.program
        if session.verified is None or session.options.compiler != "fx" or not (plan.swaps or plan.reruns):
            return None
        decisions = schedule(program, plan.reruns).decisions(plan)
        moved = {buffer for buffer, decision in enumerate(decisions) if decision is not Decision.KEEP}
        graphs, inputs = [copy_graph(graph) for graph in lowered.graphs], input_names(self._module.graph)
        described = [results(graph, inputs, moved, program.buffer_names) for graph in graphs]
        device, verified, recorder = session.device, session.verified, session.recorder
        return Reference(program, graphs, described, device=device, verified=verified, recorder=recorder)


class SavedSequence:
    """A step that was recorded by saved-tensor hooks, in the place of a captured graph."""

    def __init__(self, session: Session, index: int, recorded: Recorded) -> None:
        self._session, self.index, self._recorded = session, index, recorded
        self.program, self.costs = lower_recorded(recorded, session.name)
        self.fakes: list[Any] = []
        self.events: PlannedEvents

    def compile(self, _: Sequence[Any], *, follows: tuple[int, ...]) -> None:
        """Takes up the plan of step ``follows``, for steps that begin from now on."""
        self.events = PlannedEvents(self.index, self._recorded, self._session.steps[follows].plan)


def _join_costs(joined: Joined, costs: Sequence[OpCosts]) -> OpCosts:
    seconds, scratch = [0.0] * len(joined.program.ops), [0] * len(joined.program.ops)
    taken = [0] * len(costs)
    for segment in joined.program.segments:
        own = slice(taken[segment.graph], taken[segment.graph] + segment.stop - segment.start)
        taken[segment.graph] = own.stop
        seconds[segment.start : segment.stop] = costs[segment.graph].seconds[own]
        scratch[segment.start : segment.stop] = costs[segment.graph].scratch_bytes[own]
    return OpCosts(tuple(seconds), tuple(scratch), costs[0].source)


def _region_compiler(compiler: str) -> Callable[..., Callable[..., Any]]:
    if compiler == "inductor":
        from lmswap.capture import inductor  # here: it takes seconds to import

        return inductor.compile_region
    return aot.compile_region


def _resolve_tier(tier: str, device: torch.device) -> str:
    if tier == "auto":
        return "disk" if device.type == "cpu" else "host"
    if tier == "host" and device.type == "cpu":
        raise OptionError("tier 'host' on a CPU model would move memory to memory; use tier='disk' or 'auto'")
    if tier == "device" and device.type == "cpu":
        raise OptionError("tier 'device' is spare memory of a GPU; the model lies on the CPU")
    return tier


def _as_asked(machine: Machine, tier: str, options: Options) -> Machine:
    """``machine`` with the link that is to be emulated, and no more of its tier than may be used."""
    found = machine.tier(tier)
    link = options.link.over(found.link) if options.link else found.link
    limits = [found.capacity_bytes]
    if options.host_budget_bytes is not None:
        limits.append(options.host_budget_bytes)
    if tier == "device" and options.budget_bytes is not None:
        limits.append(found.capacity_bytes - options.budget_bytes)
        if limits[-1] <= 0:
            raise OptionError(
                f"tier='device' has nothing to spare: {format_bytes(found.capacity_bytes)} of the device are free, and "
                f"the budget is {format_bytes(options.budget_bytes)}"
            )
    return replace(machine, tiers=(replace(found, link=link, capacity_bytes=min(limits)),))


def _resolve_budget(options: Options, memory: DeviceMemory) -> int:
    total_bytes, free_bytes = memory.total_bytes(), memory.free_bytes()
    if options.budget_bytes is None:
        return int(_AUTO_SHARE * (free_bytes + memory.used_bytes()))
    if options.budget_bytes > total_bytes:
        raise OptionError(
            f"budget {format_bytes(options.budget_bytes)} is more than the device has ({format_bytes(total_bytes)})"
        )
    return options.budget_bytes


def _open_engine(device: torch.device, tier: str, machine: Machine, options: Options) -> _C.Engine:
    link = options.link
    native = _C.Engine(
        driver="cuda" if device.type == "cuda" else "host",
        device=device.index or 0,
        out_bytes_per_second=link.out_bytes_per_second if link else 0.0,
        in_bytes_per_second=link.in_bytes_per_second if link else 0.0,
        shared_link=(link.shared_file if link else None) or "",
        audits=options.verify,
        wipes=options.wipe,
    )
    directory = swap_directory(options.disk_directory) if tier == "disk" else ""
    open_tier(native, tier, machine.tier(tier).capacity_bytes, directory)
    return native
