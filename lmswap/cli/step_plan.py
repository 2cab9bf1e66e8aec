"""The plan of a step within a budget that counts what `lmswap.enable` counted, and its figures."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from lmswap.analyze.memory import StepMemory
from lmswap.errors import PlanInfeasible
from lmswap.ir.bytesize import SHARE, format_bytes, min_share_taken, parse_budget, parse_share, unit_of
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import SHARED_KINDS, BufferKind, Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Timeline
from lmswap.planner import KEEP_WHAT_FITS, make_plan
from lmswap.planner.simulate import simulate_swaps
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.picture import KINDS

_WHOLE = "the unplanned peak"  # of which a budget may be a share
# What would reduce the bytes of a kind that an op needs, where these are a notable share of all that it needs.
_REMEDIES = {
    BufferKind.WEIGHT: "smaller layers",
    BufferKind.SUMMED_GRADIENT: "fewer trained parameters",
    BufferKind.OPTIMIZER_STATE: "an optimizer with less state",
}
_NOTABLE = 0.1


@dataclass(frozen=True)
class StepPlan:
    """A step's plan for a machine, the budget that it was made for, and the seconds that this took."""

    memory: StepMemory
    machine: Machine
    plan: Plan
    budget_bytes: int
    planning_seconds: float
    note: str = ""  # where the budget is another than the one that was given

    @property
    def program(self) -> Program:
        """The planned step."""
        return self.memory.program

    @property
    def moves_weights(self) -> bool:
        """Whether weights move: they may stay over the step's end, where training fetches them in each step."""
        buffers = self.program.buffers
        return any(buffers[swap.buffer].kind is BufferKind.WEIGHT for swap in self.plan.swaps)

    @property
    def peak_bytes(self) -> int:
        """As the budget counts, without the margin."""
        fixed = self.program.fixed_memory
        return self.plan.predicted_peak_bytes + fixed.before_bytes + fixed.reserve_bytes

    @property
    def bound_seconds(self) -> float:
        """No plan is faster, with ops in this order; 0 where no bound is known."""
        return self.plan.certificate.seconds if self.plan.certificate else 0.0

    def ratios(self) -> tuple[str, str]:
        """The plan's seconds and those of the bound, over those in unlimited memory, as text."""
        free_seconds = self.memory.costs.free_seconds or 1.0
        return f"{self.plan.predicted_seconds / free_seconds:.3f}", f"{self.bound_seconds / free_seconds:.3f}"

    @property
    def roofline_seconds(self) -> float:
        """The seconds of the step's FLOPs alone; those of ops that checkpointing runs twice count twice."""
        return sum(op.flops for op in self.program.ops) / self.machine.flops_per_second

    def state_bytes(self) -> dict[str, int]:
        """Bytes of a whole step's parameters, gradients and optimizer state, by name."""
        return {KINDS[kind][0]: self.program.bytes_of(kind) for kind in SHARED_KINDS}

    def predicted(self) -> Timeline:
        """The simulated step, with memory as the budget counts it, and by kind if it is a whole one."""
        timeline, other_bytes = self._simulated(self.memory), self.peak_bytes - self.plan.predicted_peak_bytes
        timeline = replace(timeline, memory=tuple((at, nbytes + other_bytes) for at, nbytes in timeline.memory))
        if not self.program.is_cyclic:
            return timeline
        costs = self.memory.costs
        without_scratch = OpCosts(costs.seconds, (0,) * len(costs.seconds), costs.source)
        by_kind = {}
        for kind in filter(self.program.bytes_of, SHARED_KINDS):
            found = self._simulated(StepMemory(self.program, without_scratch, counted_kind=kind))
            by_kind[kind] = tuple(nbytes for _, nbytes in found.memory)
        rest = (nbytes - sum(state) for (_, nbytes), *state in zip(timeline.memory, *by_kind.values(), strict=True))
        return replace(timeline, bytes_by_kind=by_kind | {BufferKind.ACTIVATION: tuple(rest)})

    def _simulated(self, memory: StepMemory) -> Timeline:
        _, memory = memory.with_recomputes(self.plan.recomputes)
        return simulate_swaps(memory, self.machine, self.plan.swaps)

    def copied_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes copied in and out in each step, by tier."""
        buffers = schedule(self.program, self.plan.recomputes).program.buffers
        found = defaultdict[str, list[int]](lambda: [0, 0])
        for swap in self.plan.swaps:
            found[swap.tier][0] += buffers[swap.buffer].nbytes
            found[swap.tier][1] += buffers[swap.buffer].nbytes if swap.out_start is not None else 0
        return {tier: (in_bytes, out_bytes) for tier, (in_bytes, out_bytes) in found.items()}

    def figures(self) -> dict[str, Any]:
        """Return what `--json` prints: schema "lmswap.plan/3", in bytes and seconds; peak and budget as in reports."""
        program, plan = self.program, self.plan
        decisions = buffer_decisions(program, plan)
        nbytes = {kind: sum(row.nbytes for row in decisions if row.decision is kind) for kind in Decision}
        figures = {
            "schema": "lmswap.plan/3",
            "program": program.name,
            "policy": plan.policy,
            "budget_bytes": self.budget_bytes,
            "step_budget_bytes": plan.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "step_seconds": plan.predicted_seconds,
            "unlimited_seconds": self.memory.costs.free_seconds,
            "lower_bound_seconds": self.bound_seconds,
            "roofline_seconds": self.roofline_seconds,
            "planning_seconds": self.planning_seconds,
            "kept_bytes": nbytes[Decision.KEEP],
            "swapped_bytes": nbytes[Decision.SWAP],
            "recomputed_bytes": nbytes[Decision.RECOMPUTE],
            "tier_bytes": plan.tier_bytes,
            "copied_bytes": {tier: {"in": i, "out": out} for tier, (i, out) in self.copied_bytes().items()},
            "plan": json.loads(plan.to_json()),
        }
        if program.is_cyclic:
            figures["whole_step"] = self.state_bytes()
        return figures


def plan_step(policy: str, memory: StepMemory, machine: Machine, budget: str, **limits: Any) -> StepPlan:
    """Plan a step within ``budget``; where a share is too small, within the least that fits.

    Raises:
        PlanInfeasible: no plan fits a budget of bytes, or one that the machine has.
        OptionError, TierError: see `make_plan`.
    """
    budget_bytes = parse_step_budget(budget, memory)
    started, note = time.perf_counter(), ""
    try:
        plan = plan_within(policy, memory, machine, budget_bytes=budget_bytes, **limits)
    except PlanInfeasible as error:
        if (share := parse_share(budget, of=_WHOLE)) is None:
            raise error.but(unit=unit_of(budget)) from None
        min_share = error.parts[-1][1] / memory.peak.nbytes
        if error.needed_bytes > machine.device_bytes:
            instead = [f"of which '{machine.name}' has {format_bytes(machine.device_bytes)}", error.instead]
            raise error.but(shares=(100 * share, 100 * min_share), instead=", ".join(filter(None, instead))) from None
        budget_bytes = error.needed_bytes
        plan = plan_within(policy, memory, machine, budget_bytes=budget_bytes, **limits)
        note = min_share_taken(share, min_share, error)
    return StepPlan(memory, machine, plan, budget_bytes, time.perf_counter() - started, note)


def plan_within(policy: str, memory: StepMemory, machine: Machine, *, budget_bytes: int, **limits: Any) -> Plan:
    """Plan under a budget that counts what `lmswap.enable` counted where the program was captured.

    Raises:
        PlanInfeasible: no plan fits; its parts are those that such a budget counts.
        OptionError, TierError: see `make_plan`.
    """
    program, peak, fixed = memory.program, memory.peak, memory.program.fixed_memory
    # A plan that moves nothing has a smaller margin, with which alone the whole step may fit.
    unmoved_bytes, may_keep = peak.nbytes + fixed.total_bytes(is_unmoved=True), policy in KEEP_WHAT_FITS
    is_unmoved = may_keep and unmoved_bytes <= budget_bytes < peak.nbytes + fixed.total_bytes()
    limits["budget_bytes"] = budget_bytes - fixed.total_bytes(is_unmoved=is_unmoved)
    try:
        return make_plan(policy, program, memory.costs, machine, **limits)
    except PlanInfeasible as error:
        needed_step_bytes, needed_bytes = error.needed_bytes, error.needed_bytes + fixed.total_bytes()
        if is_unmoved := may_keep and unmoved_bytes < needed_bytes:
            needed_step_bytes, needed_bytes = peak.nbytes, unmoved_bytes
        refusal = error.but(
            budget_bytes=budget_bytes,
            needed_bytes=needed_bytes,
            parts=(*fixed.parts(is_unmoved=is_unmoved), ("for the step's tensors", needed_step_bytes)),
            counted=fixed.counted,
            uncounted_bytes=fixed.uncounted_bytes,
            gradient_bytes=program.gradient_bytes,
        )
        if is_unmoved:
            refusal = refusal.but(where=f"op {peak.op} {program.ops[peak.op].title}", live=peak.live)
        if program.is_cyclic:
            refusal = _with_state(refusal, program, needed_step_bytes, limits["min_swap_bytes"])
        raise refusal from None


def _with_state(refusal: PlanInfeasible, program: Program, step_bytes: int, min_swap_bytes: int) -> PlanInfeasible:
    """Return the refusal of a whole step with the bytes that do not depend on the batch, and what would reduce them."""
    kinds = dict(zip(program.buffer_names, (buffer.kind for buffer in program.buffers), strict=True))
    nbytes = {kind: sum(n for name, n in refusal.live if kinds.get(name) is kind) for kind in SHARED_KINDS}
    small_bytes = step_bytes - sum(n for _, n in refusal.live)  # of buffers that stay, though the op does not use them
    remedies = [remedy for kind, remedy in _REMEDIES.items() if nbytes[kind] >= _NOTABLE * step_bytes]
    if small_bytes >= _NOTABLE * step_bytes:
        stay = f"{format_bytes(small_bytes)} of smaller buffers stay"
        remedies.append(f"a --min-swap below {format_bytes(min_swap_bytes)} ({stay})")
    return refusal.but(state_bytes=sum(nbytes.values()), instead=", ".join(remedies))


def parse_step_budget(text: str, memory: StepMemory) -> int:
    """Parse a budget: bytes, or a share of the step's unplanned peak, plus the fixed memory."""
    share = parse_share(text, of=_WHOLE)
    if share is None:
        return parse_budget(text, also=(SHARE,))
    return memory.program.fixed_memory.total_bytes() + max(1, int(share * memory.peak.nbytes))
