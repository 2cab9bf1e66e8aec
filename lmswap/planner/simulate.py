"""Simulation of a step under a plan: step + machine + plan → timeline with memory curve.

Compute, recomputes included, and the two copy lanes run in parallel; the host, if the machine has one, queues their
work in the same order, and starts when the device does. Just before op p, in this order:

1. out_starts: the copy starts as soon as the out lane is free;
2. releases: compute stalls until that copy has ended, then the memory is free;
3. in_starts: memory is taken, the copy starts as soon as the in lane is free;
4. first_uses: compute stalls until the bytes have arrived.

Actions of one kind at one position follow the order of ``Plan.swaps``. Memory follows from the order of instructions
alone; time is a max-plus recurrence over it, one pass of O(ops + swaps).

A cyclic step is one of many that are alike: what is swapped over its end is non-resident at its start, and no copy is
under way at either.
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
    min_counted_bytes: int = 0,
    released: frozenset[int] = frozenset(),
    lanes: Lanes | None = None,
) -> Timeline:
    """Predict the timeline of one step of ``program`` under ``plan``.

    Args:
        program: the planned step.
        costs: of its ops.
        machine: with the plan's tiers.
        plan: its swaps and recomputes.
        min_counted_bytes: smaller buffers are left out of the memory curve; plans count all.
        released: outputs and tangents that the caller does not hold: they count only while the step needs them.
        lanes: unused lanes to run on; by default those of ``machine``.

    Raises:
        OptionError: the plan uses a tier that ``machine`` does not have.
    """
    _, memory = StepMemory(program, costs, min_counted_bytes, released).with_recomputes(plan.recomputes)
    return _Simulation(memory, machine, plan.swaps, lanes or Lanes(machine.host)).timeline()


def simulate_swaps(memory: StepMemory, machine: Machine, swaps: Sequence[Swap]) -> Timeline:
    """As `simulate`, for planners that already have the schedule's memory."""
    return _Simulation(memory, machine, swaps, Lanes(machine.host)).timeline()


class _Simulation:
    def __init__(self, memory: StepMemory, machine: Machine, swaps: Sequence[Swap], lanes: Lanes) -> None:
        self._memory, self._swaps, self._lanes = memory, swaps, lanes
        self._buffers, self._names = memory.program.buffers, memory.program.buffer_names
        self._counted_bytes = [memory.counted_bytes(swap.buffer) for swap in swaps]
        self._links = {tier: machine.tier(tier).link.while_busy for tier in {swap.tier for swap in swaps}}
        self._resident_bytes = 0
        self._spans: list[Span] = []
        self._curve: list[tuple[float, int]] = []
        self._out_end: dict[int, float] = {}  # by swap
        self._in_end: dict[int, float] = {}

    def timeline(self) -> Timeline:
        memory, lanes, spans, curve = self._memory, self._lanes, self._spans, self._curve
        num_ops = len(memory.program.ops)
        actions, allocated_bytes, freed_bytes = self._actions(num_ops), memory.allocated_bytes, memory.freed_bytes
        persistent_bytes = sum(memory.counted_bytes(buffer.id) for buffer in self._buffers if buffer.is_persistent)
        self._resident_bytes = persistent_bytes - sum(
            nbytes for swap, nbytes in zip(self._swaps, self._counted_bytes, strict=True) if swap.crosses_end(num_ops)
        )
        if memory.program.is_cyclic:
            curve.append((0.0, self._resident_bytes))
        allocated_bytes = [allocated_bytes[0] - persistent_bytes, *allocated_bytes[1:]]  # that is there already
        steps = zip(memory.program.ops, memory.costs.seconds, memory.costs.scratch_bytes, strict=True)
        for position, (op, seconds, scratch_bytes) in enumerate(steps):
            self._resident_bytes -= freed_bytes[position]
            for action, number in actions.get(position, ()):
                action(number)
            self._resident_bytes += allocated_bytes[position]
            curve.append((lanes.clock, self._resident_bytes + scratch_bytes))
            self._queue(lanes.queue_op, op.name)
            start = lanes.clock
            lanes.run(seconds)
            spans.append(Span(Lane.COMPUTE, op.name, start, lanes.clock))
        for action, number in actions.get(num_ops, ()):
            action(number)
        curve.append((lanes.clock, self._resident_bytes - freed_bytes[-1] + persistent_bytes))
        return Timeline("predicted", tuple(spans), tuple(curve))

    def _actions(self, num_ops: int) -> dict[int, list[tuple[Callable[[int], None], int]]]:
        """By position of the step: the actions of swaps, by number, in their order."""
        effects = {
            SwapAction.OUT_START: self._start_out,
            SwapAction.RELEASE: self._release,
            SwapAction.IN_START: self._start_in,
            SwapAction.FIRST_USE: self._await,
        }
        found = defaultdict[int, list[tuple[SwapAction, int]]](list)
        for number, swap in enumerate(self._swaps):
            for position, action in swap.actions(num_ops):
                found[position].append((action, number))
        return {
            position: [(effects[action], number) for action, number in sorted(here)] for position, here in found.items()
        }

    def _start_out(self, number: int) -> None:
        self._out_end[number] = self._copy(Lane.OUT, self._swaps[number])

    def _release(self, number: int) -> None:
        self._stall(self._out_end.get(number, 0.0), self._swaps[number], "leave")
        self._resident_bytes -= self._counted_bytes[number]
        self._curve.append((self._lanes.clock, self._resident_bytes))

    def _start_in(self, number: int) -> None:
        # Its own copy out has ended: release, which is no later, or in the step before, has waited for it.
        self._in_end[number] = self._copy(Lane.IN, self._swaps[number])
        self._resident_bytes += self._counted_bytes[number]
        self._curve.append((self._lanes.clock, self._resident_bytes))

    def _await(self, number: int) -> None:
        self._stall(self._in_end[number], self._swaps[number], "arrive")

    def _copy(self, lane: Lane, swap: Swap) -> float:
        name, nbytes = self._names[swap.buffer], self._buffers[swap.buffer].nbytes
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
            name = f"{self._names[swap.buffer]} to {what}"
            self._spans.append(Span(Lane.STALL, name, start, self._lanes.clock, 0, swap.buffer))
