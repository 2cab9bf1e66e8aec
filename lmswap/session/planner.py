"""Searches plans for one model's steps; refusals are in terms of the model's budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from lmswap.capture.caller_memory import LossMeter, without_losses
from lmswap.errors import PlanInfeasible, TierError
from lmswap.hardware.local_ranks import num_local_processes
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.planner import make_plan, reprice
from lmswap.planner.memory.fit_arena import fit_arena
from lmswap.planner.memory.pack_arena import pack_arena
from lmswap.planner.memory.shrink_residency import shrink_residency
from lmswap.progress import reported
from lmswap.session.context import ModelContext
from lmswap.session.plan_request import PlanRequest
from lmswap.session.retention import Retention

# What planning between steps takes from a CPU's budget: 30 MiB at 406 ops, 22 at 2,071, 74 at 50,351.
_PLANNING_BYTES, _PLANNING_BYTES_PER_OP = 32 * 2**20, 1024


class Planner:
    """Searches plans of one model's steps, and lays out their tensors in an arena, if there is one."""

    def __init__(self, context: ModelContext) -> None:
        self._options, self._engine, self._memory = context.options, context.engine, context.memory
        self.losses = LossMeter(context.memory)
        self._laid_out: tuple[tuple[Program, Plan, Retention], ArenaLayout] | None = None  # the last layout

    @reported("planning a step", "planning")
    def search(self, request: PlanRequest, choices: Sequence[Retention]) -> tuple[PlanRequest, Plan]:
        """Search a plan for ``request``, with each of ``choices`` of retention until one is met.

        Returns:
            The alternative of the request that the plan meets, and the plan.

        Raises:
            PlanInfeasible: no plan fits the budget.
            TierError: no plan fits the tier.
        """
        # By the bytes that plans may take, which do not depend on what callers hold.
        plans: dict[int, Plan | PlanInfeasible | TierError] = {}
        *others, least = request.alternatives(choices)
        try:
            for alternative in others:
                with suppress(PlanInfeasible, TierError):
                    return alternative, self._search(alternative, plans)
            return least, self._search(least, plans)
        finally:
            plans.clear()  # a refusal keeps the frames that it passed, which keep these

    def _search(self, request: PlanRequest, plans: dict[int, Plan | PlanInfeasible | TierError]) -> Plan:
        program, costs, machine, allowance = (
            request.program,
            request.costs_with_streams,
            request.machine,
            request.allowance,
        )
        limits, priced = self._options.swap_limits, request.priced

        def plan_within(max_bytes: int) -> Plan:
            if max_bytes not in plans:
                certificate = priced.certificate if priced and priced.budget_bytes == max_bytes else None
                given = {"budget_bytes": max_bytes, "certificate": certificate, **limits}
                try:
                    plans[max_bytes] = make_plan(request.policy, program, costs, machine, fetches_weights=True, **given)
                except (PlanInfeasible, TierError) as error:
                    plans[max_bytes] = error
            if isinstance(found := plans[max_bytes], Exception):
                raise found
            return found

        def placed_bytes(plan: Plan, share: float) -> int:
            shorter = shrink_residency(plan, program, costs, machine, share=share)
            places = self.layout(program, costs, shorter, request.retention)
            return places.total_bytes if places is not None else 0

        try:
            plan, longer_away = fit_arena(plan_within, placed_bytes, allowance.step_bytes)
            if not longer_away:
                return plan
            shorter = shrink_residency(plan, program, costs, machine, share=longer_away)
            return reprice(shorter, program, costs, machine, certificate=plan.certificate, **limits)
        except PlanInfeasible as error:
            raise self._of_budget(error, request) from None
        except TierError as error:
            if (advice := self._advice_on_tier(machine)) is None:
                raise
            raise TierError(f"{error}. {advice}") from None
        finally:
            self._memory.compact()

    def _of_budget(self, refusal: PlanInfeasible, request: PlanRequest) -> PlanInfeasible:
        """Return ``refusal`` of what is left to the step in terms of the user's budget."""
        allowance = request.allowance
        return refusal.but(
            budget_bytes=allowance.budget_bytes,
            needed_bytes=refusal.needed_bytes + allowance.fixed_bytes,
            policy=request.policy,
            parts=(*allowance.parts, ("for the step's tensors", refusal.needed_bytes)),
            unit=self._options.budget_unit,
            counted=allowance.account.counted,
            uncounted_bytes=allowance.account.uncounted_bytes,
            gradient_bytes=request.program.gradient_bytes,
        )

    def _advice_on_tier(self, machine: Machine) -> str | None:
        """Return why the tier may have more room than a plan was given, if it may."""
        tier = self._options.tier
        if tier == "compressed" and machine.tier(tier).ratio == 1:
            return "Until a step has shown how well its tensors compress, they count there as they are"
        count = num_local_processes()
        if tier != "host" or count == 1 or self._options.host_budget_bytes is not None:
            return None
        share = f"{count} processes of this machine train together, as their launcher says: each may pin 1/{count}"
        return f"{share}; host_budget sets it otherwise"

    def with_losses(self, costs: OpCosts, program: Program, graphs: tuple[int, ...]) -> OpCosts:
        """Return ``costs`` with the measured memory of these graphs' losses, if known; an arena holds no loss."""
        if self._engine.arena is not None:
            return without_losses(costs, program)
        return self.losses.with_measured(costs, program, graphs)

    def reserve_search_memory(self, program: Program) -> None:
        """Make planning reuse the memory that steps keep, instead of adding to it."""
        self._memory.decommit(_PLANNING_BYTES + _PLANNING_BYTES_PER_OP * len(program.ops))

    def layout(self, program: Program, costs: OpCosts, plan: Plan, retention: Retention) -> ArenaLayout | None:
        """Return the layout of ``plan``'s step if the caller holds ``retention``; None without an arena."""
        if self._engine.arena is None:
            return None
        inputs = program, plan, retention
        if self._laid_out is None or any(a is not b for a, b in zip(inputs, self._laid_out[0], strict=True)):
            self._laid_out = inputs, pack_arena(program, costs, plan, num_held=retention.num_held)
        return self._laid_out[1]

    def first_layout(
        self, program: Program, costs: OpCosts, plan: Plan, choices: Iterable[Retention], max_bytes: int
    ) -> tuple[ArenaLayout | None, Retention]:
        """Return a layout of a plan of any origin: by the first of ``choices`` with which it takes ``max_bytes``.

        If it takes more with each of them, the layout by the first.
        """
        found: list[tuple[ArenaLayout | None, Retention]] = []
        for choice in choices:
            found.append((self.layout(program, costs, plan, choice), choice))
            places = found[-1][0]
            if places is None or places.total_bytes <= max_bytes:
                return found[-1]
        return found[0]
