"""Makes plans within a model's allowance; refusals are in terms of the model's budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from lmswap.capture.caller_memory import LossMeter, loss_bytes, without_losses
from lmswap.errors import PlanInfeasible, TierError
from lmswap.execute.engine import SwapEngine
from lmswap.hardware.local_ranks import num_local_processes
from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.options import Options
from lmswap.plan import make_plan, reprice
from lmswap.plan.cache import CachedPlan
from lmswap.plan.fit_arena import fit_arena
from lmswap.plan.pack_arena import pack_arena
from lmswap.plan.shrink_residency import shrink_residency
from lmswap.progress import reported
from lmswap.session.budget import Allowance
from lmswap.session.diagnostics import Notes
from lmswap.session.retention import RetentionEstimate

# What planning between steps takes from a CPU's budget: 30 MiB at 406 ops, 22 at 2,071, 74 at 50,351.
_PLANNING_BYTES, _PLANNING_BYTES_PER_OP = 32 * 2**20, 1024


class Planner:
    """Makes the plans of one model's steps, and the layouts of their tensors in an arena, if there is one."""

    def __init__(
        self,
        options: Options,
        tier: str,
        *,
        engine: SwapEngine,
        memory: DeviceMemory,
        retention: RetentionEstimate,
        notes: Notes,
    ) -> None:
        """``notes`` takes sentences for reports."""
        self._options, self._tier = options, tier
        self._engine, self._memory, self._notes = engine, memory, notes
        self.losses = LossMeter(memory)
        self.retention = retention
        # The last inputs of `layout`, and the layout.
        self._placed: tuple[tuple[Program, Plan, Mapping[BufferKind, int]], ArenaLayout] | None = None

    def first(
        self, graphs: tuple[int, ...], program: Program, costs: OpCosts, machine: Machine, allowance: Allowance
    ) -> CachedPlan:
        """Make a plan, with the costs it was made by: assumed memory of a loss is no reason to refuse a budget.

        Raises:
            PlanInfeasible: no plan fits the budget.
            TierError: no plan fits the tier.
        """
        try:
            return CachedPlan(self.search(program, costs, machine, allowance), costs, machine, allowance.room)
        except PlanInfeasible:
            lean = self.losses.without_assumed(costs, program, graphs)
            if lean == costs:
                raise
        planned = CachedPlan(self.search(program, lean, machine, allowance), lean, machine, allowance.room)
        assumed = format_bytes(loss_bytes(costs, program))
        self._notes.append(f"the budget leaves less than {assumed} to the loss: one that takes as much exceeds it")
        return planned

    @reported("planning a step", "planning")
    def search(
        self,
        program: Program,
        costs: OpCosts,
        machine: Machine,
        allowance: Allowance,
        *,
        policy: str | None = None,
        budget_bytes: int | None = None,
        effort: int = 1,
        priced: Plan | None = None,
    ) -> Plan:
        """Search a plan within ``allowance`` by the model's policy; ``policy`` and ``budget_bytes`` override both.

        ``priced`` is a plan by the same costs and machine, whose certificate holds for the same budget.

        Raises:
            PlanInfeasible, TierError: see `first`.
        """
        policy = policy or self._options.policy
        parameters: dict[str, Any] = {"effort": effort} if policy == "auto" else {}
        limits: dict[str, Any] = {"tier": self._tier, "min_swap_bytes": self._options.min_swap_bytes}

        @cache  # plans of as many bytes do not depend on what callers hold
        def plan_within(most_bytes: int) -> Plan:
            return make_plan(
                policy,
                program,
                costs,
                machine,
                budget_bytes=most_bytes,
                certificate=priced.certificate if priced is not None and priced.budget_bytes == most_bytes else None,
                **limits,
                **parameters,
            )

        def placed_bytes(plan: Plan, share: float) -> int:
            return self.placed_bytes(program, costs, shrink_residency(plan, program, costs, machine, share=share))

        most_bytes = budget_bytes or allowance.step_bytes
        try:
            plan, longer_away = self._search_lowering_retention(
                lambda: fit_arena(plan_within, placed_bytes, most_bytes)
            )
            if not longer_away:
                return plan
            shorter = shrink_residency(plan, program, costs, machine, share=longer_away)
            return reprice(shorter, program, costs, machine, certificate=plan.certificate, **limits)
        except PlanInfeasible as error:  # the planner's budget is the step's share: restate it in terms of the user's
            raise error.but(
                budget_bytes=allowance.budget_bytes,
                needed_bytes=error.needed_bytes + allowance.fixed_bytes,
                policy=policy,
                parts=(*allowance.parts, ("for the step's tensors", error.needed_bytes)),
                unit=self._options.budget_unit,
            ) from None
        except TierError as error:
            if machine.tier(self._tier).ratio == 1 and self._tier == "compressed":
                raise TierError(
                    f"{error}. Until a step has shown how well its tensors compress, they count there as they are"
                ) from None
            count = num_local_processes()
            if self._tier != "host" or count == 1 or self._options.host_budget_bytes is not None:
                raise
            share = f"{count} processes of this machine train together, as their launcher says: each may pin 1/{count}"
            raise TierError(f"{error}. {share}; host_budget sets it otherwise") from None
        finally:
            self._memory.compact()

    def _search_lowering_retention(self, search: Callable[[], tuple[Plan, float]]) -> tuple[Plan, float]:
        """Return what ``search`` finds; while it finds nothing, assume that the caller holds less."""
        level = self.retention.level
        while True:
            try:
                return search()
            except PlanInfeasible:
                if self._engine.arena is None or not self.retention.lower():
                    self.retention.level = level
                    raise

    def with_losses(self, costs: OpCosts, program: Program, graphs: tuple[int, ...]) -> OpCosts:
        """Return ``costs`` with the measured memory of these graphs' losses, if known; an arena holds no loss."""
        if self._engine.arena is not None:
            return without_losses(costs, program)
        return self.losses.with_measured(costs, program, graphs)

    def reserve_search_memory(self, program: Program) -> None:
        """Make planning reuse the memory that steps keep, instead of adding to it."""
        self._memory.decommit(_PLANNING_BYTES + _PLANNING_BYTES_PER_OP * len(program.ops))

    def placed_bytes(self, program: Program, costs: OpCosts, plan: Plan) -> int:
        """Return the bytes of the layout of ``plan``'s step; 0 without an arena."""
        places = self.layout(program, costs, plan)
        return places.total_bytes if places is not None else 0

    def layout(self, program: Program, costs: OpCosts, plan: Plan) -> ArenaLayout | None:
        """Return the layout of ``plan``'s step, cached for the plan that is adopted next; None without an arena."""
        if self._engine.arena is None:
            return None
        inputs = program, plan, self.retention.num_held
        if self._placed is None or any(one is not other for one, other in zip(inputs, self._placed[0], strict=True)):
            self._placed = inputs, pack_arena(program, costs, plan, num_held=inputs[2])
        return self._placed[1]

    def layout_within(self, program: Program, costs: OpCosts, plan: Plan, most_bytes: int) -> ArenaLayout | None:
        """Return the layout of a plan of any origin, which may assume that the caller holds less."""
        level = self.retention.level
        while (places := self.layout(program, costs, plan)) is not None and places.total_bytes > most_bytes:
            if not self.retention.lower():
                self.retention.level = level
                return self.layout(program, costs, plan)
        return places
