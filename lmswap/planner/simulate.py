"""Simulation of a step under a plan: step + machine + plan → timeline with memory curve.

Compute, recomputes included, and the two copy lanes run in parallel; the host, if the machine has one, queues their
work in the same order, and starts when the device does. Just before op p, in this order:

1. out_starts: the copy starts as soon as the out lane is free;
2. releases: compute stalls until that copy has ended, then the memory is free;
3. in_starts: memory is taken, the copy starts as soon as the in lane is free;
4. first_uses: compute stalls until the bytes have arrived.

Actions of one kind at one position follow the order of ``Plan.swaps``. Memory follows from the order of instructions
alone; time is a max-plus recurrence over it, one pass of O(ops + swaps).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from lmswap.analyze.memory import StepMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan, Swap, SwapAction
from lmswap.ir.program import Program
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.planner.lane_model import Lanes


def simulate(
    program: Program,
    costs: OpCosts,
    machine: Machine,
    plan: Plan,
    *,
    counted_from_bytes: int = 0,
    released: frozenset[int] = frozenset(),
    lanes: Lanes | None = None,
) -> Timeline:
    """Predict the timeline of one step of ``program`` under ``plan``.

    Args:
        program: the planned step.
        costs: of its ops.
        machine: with the plan's tiers.
        plan: its swaps and recomputes.
        counted_from_bytes: smaller buffers are left out of the memory curve; plans count all.
        released: outputs and tangents that the caller does not hold: they count only while the step needs them.
        lanes: unused lanes to run on; by default those of ``machine``.

    Raises:
        OptionError: the plan uses a tier that ``machine`` does not have.
    """
    _, memory = StepMemory(program, costs, counted_from_bytes, released).scheduled(plan.recomputes)
    return _Run(memory, machine, plan.swaps, lanes or Lanes(machine.host)).timeline()


def simulate_swaps(memory: StepMemory, machine: Machine, swaps: Sequence[Swap]) -> Timeline:
    """As `simulate`, for planners that already have the schedule's memory."""
    return _Run(memory, machine, swaps, Lanes(machine.host)).timeline()


class _Run:
    def __init__(self, memory: StepMemory, machine: Machine, swaps: Sequence[Swap], lanes: Lanes) -> None:
        self._memory, self._swaps, self._lanes = memory, swaps, lanes
        self._counted_bytes = [memory.counted_bytes(swap.buffer) for swap in swaps]
        self._links = {tier: machine.tier(tier).link.while_busy for tier in {swap.tier for swap in swaps}}
        self._resident_bytes = 0
        self._spans: list[Span] = []
        self._curve: list[tuple[float, int]] = []
        self._out_end: dict[int, float] = {}  # by swap
        self._in_end: dict[int, float] = {}

    def timeline(self) -> Timeline:
        memory, lanes = self._memory, self._lanes
        program, costs = memory.program, memory.costs
        actions = self._actions()
        for position in range(len(program.ops) + 1):
            self._resident_bytes -= memory.dead_bytes[position]
            for rank, number in actions.get(position, ()):
                self._act(rank, number)
            self._resident_bytes += memory.born_bytes[position]
            if position == len(program.ops):
                break
            self._curve.append((lanes.clock, self._resident_bytes + costs.scratch_bytes[position]))
            name = program.ops[position].name
            self._queue(lanes.queue_op, name)
            start = lanes.clock
            lanes.run(costs.seconds[position])
            self._spans.append(Span(Lane.COMPUTE, name, start, lanes.clock))
        self._curve.append((lanes.clock, self._resident_bytes))
        return Timeline("predicted", tuple(self._spans), tuple(self._curve))

    def _actions(self) -> dict[int, list[tuple[SwapAction, int]]]:
        actions: dict[int, list[tuple[SwapAction, int]]] = defaultdict(list)
        for number, swap in enumerate(self._swaps):
            for position, action in swap.actions():
                actions[position].append((action, number))
        for found in actions.values():
            found.sort()
        return actions

    def _act(self, action: SwapAction, number: int) -> None:
        swap, nbytes = self._swaps[number], self._counted_bytes[number]
        match action:
            case SwapAction.OUT_START:
                self._out_end[number] = self._copy(Lane.OUT, swap)
            case SwapAction.RELEASE:
                self._stall(self._out_end.get(number, 0.0), swap, "leave")
                self._resident_bytes -= nbytes
                self._curve.append((self._lanes.clock, self._resident_bytes))
            case SwapAction.IN_START:
                # Its own copy out has ended: release, which is no later, has waited for it.
                self._in_end[number] = self._copy(Lane.IN, swap)
                self._resident_bytes += nbytes
                self._curve.append((self._lanes.clock, self._resident_bytes))
            case SwapAction.FIRST_USE:
                self._stall(self._in_end[number], swap, "arrive")

    def _copy(self, lane: Lane, swap: Swap) -> float:
        program = self._memory.program
        name, nbytes = program.buffer_names[swap.buffer], program.buffers[swap.buffer].nbytes
        self._queue(self._lanes.queue_copy, name)
        start, end = self._lanes.copy(lane, self._links[swap.tier], nbytes)
        self._spans.append(Span(lane, name, start, end, nbytes, swap.buffer))
        return end

    def _queue(self, queue: Callable[[], None], name: str) -> None:
        start = self._lanes.clock
        queue()
        if self._lanes.clock > start:
            self._spans.append(Span(Lane.HOST, name, start, self._lanes.clock))

    def _stall(self, until: float, swap: Swap, what: str) -> None:
        start = self._lanes.clock
        self._lanes.wait(until)
        if self._lanes.clock > start:
            name = f"{self._memory.program.buffer_names[swap.buffer]} to {what}"
            self._spans.append(Span(Lane.STALL, name, start, self._lanes.clock, 0, swap.buffer))
