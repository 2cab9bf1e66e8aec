"""Searches plans for one model's steps within its budget; refusals are in terms of that. It activates none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from lmswap.analyze.memory import StepMemory
from lmswap.capture.caller_memory import LossMeter, loss_bytes, without_losses
from lmswap.errors import LmswapError, PlanInfeasible, TierError
from lmswap.hardware.local_ranks import num_local_processes
from lmswap.ir.arena_layout import ArenaLayout
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.planner import import_search, is_search_imported, make_plan, reprice
from lmswap.planner.cache import CachedPlan
from lmswap.planner.memory.fit_arena import fit_arena
from lmswap.planner.memory.pack_arena import pack_arena
from lmswap.planner.memory.shrink_residency import shrink_residency
from lmswap.progress import reported
from lmswap.session.allowance import Allowance
from lmswap.session.context import ModelContext
from lmswap.session.engine_setup import notes_on_sample
from lmswap.session.plan_request import PlanRequest
from lmswap.session.planned_step import PlannedStep
from lmswap.session.retention import Retention

# What planning between steps takes from a CPU's budget: 52 MiB at 22 ops, 30 at 406, 22 at 2,071, 74 at 50,351.
_PLANNING_BYTES, _PLANNING_BYTES_PER_OP = 56 * 2**20, 1024


class Planner:
    """Searches plans of one model's steps, and lays out their tensors in an arena, if there is one."""

    def __init__(self, context: ModelContext) -> None:
        self._options, self._engine, self._memory = context.options, context.engine, context.memory
        self._budget, self._retention, self._machine = context.budget, context.retention, context.machine
        self._notes = context.plan_notes
        self.losses = LossMeter(context.memory)
        self._laid_out: tuple[tuple[Program, Plan, Retention], ArenaLayout] | None = None  # the last layout

    def request(self, program: Program, costs: OpCosts, machine: Machine, allowance: Allowance) -> PlanRequest:
        """Return the request for a plan by the model's policy, for what its caller is assumed to hold."""
        return PlanRequest(program, costs, machine, allowance, self._retention.assumed, self._options.policy)

    def search(self, request: PlanRequest) -> tuple[PlanRequest, CachedPlan]:
        """Search a plan for ``request``; in an arena for less and less retention until there is one.

        Returns:
            The request that the plan meets, which names its retention, and the plan; nothing is activated.

        Raises:
            PlanInfeasible: no plan fits the budget.
            TierError: no plan fits the tier.
        """
        choices = self._retention.choices if self._engine.arena is not None else (self._retention.assumed,)
        met, plan = self._search_alternatives(self._with_needed(request), choices)
        return met, CachedPlan(plan, met.costs, met.machine, met.allowance.room)

    def try_within(self, program: Program, costs: OpCosts, allowance: Allowance) -> CachedPlan | None:
        """Search a plan for what a step may occupy if more state streams, activate nothing; None if there is none."""
        request = self.request(program, costs, self._machine.now, allowance)
        with suppress(PlanInfeasible, TierError):
            return (self._keeping_all(request, streams=True) or self.search(request))[1]
        return None

    def search_within_budget(self, graphs: tuple[int, ...], request: PlanRequest) -> tuple[PlanRequest, CachedPlan]:
        """Search the first plan of a step, as `search`; a refused share is widened to what suffices."""
        while True:
            try:
                return self._keeping_all(request) or self._search_without_assumed(graphs, request)
            except PlanInfeasible as error:
                refusal = error.with_traceback(None)
            allowance = request.allowance
            unmoved = self._budget.unmoved(allowance, request.program)
            if allowance != unmoved:
                refusal = self._least(refusal, request.program, request.costs, unmoved)
            if not self._budget.widen(allowance, refusal):
                raise self._advised(refusal, request)
            request = replace(request, allowance=replace(allowance, budget_bytes=self._budget.nbytes))

    def search_least(
        self, request: PlanRequest, refusal: LmswapError, *, max_bytes: int | None = None
    ) -> tuple[PlanRequest, CachedPlan] | None:
        """Search the plan that takes the least, as ``refusal`` of ``request`` says; activate nothing.

        None if it takes more than ``max_bytes``, if given, or more than the tier has.
        """
        tried_bytes = 0
        while isinstance(refusal, PlanInfeasible):
            least_bytes = max(1, refusal.needed_bytes - request.allowance.fixed_bytes)
            if least_bytes <= tried_bytes or (max_bytes is not None and least_bytes > max_bytes):
                break
            tried_bytes, allowance = least_bytes, request.allowance.of_step_bytes(least_bytes)
            try:
                met, planned = self.search(replace(request, allowance=allowance, ahead_bytes=0))
            except (PlanInfeasible, TierError) as error:  # offsets of its tensors may take more
                refusal = error.with_traceback(None)
            else:
                return replace(met, allowance=request.allowance), planned
        return None

    def refusal(
        self, program: Program, costs: OpCosts, allowance: Allowance, *, streams: bool
    ) -> PlanInfeasible | None:
        """Return why no plan of the step fits ``allowance``, which names the least budget; None if one does.

        Raises:
            TierError: the tier has no room for what would have to be swapped.
        """
        request = self.request(program, costs, self._machine.now, allowance)
        try:
            self.search(request)
        except PlanInfeasible as error:
            unmoved = self._budget.unmoved(allowance, program, streams=streams)
            return self._advised(self._least(error.with_traceback(None), program, costs, unmoved), request)
        return None

    def least_bytes(self, program: Program, costs: OpCosts, allowance: Allowance, *, streams: bool = False) -> int:
        """Return the least budget found for a step, by the model's policy; a slightly smaller one may suffice, too.

        ``streams``: ``allowance`` is as if optimizer state did.
        """
        refusal = self.refusal(program, costs, allowance.of_step_bytes(1), streams=streams)
        return allowance.fixed_bytes if refusal is None else refusal.needed_bytes

    def priced(self, step: PlannedStep) -> PlannedStep:
        """Return ``step`` with its plan priced and certified by its current costs."""
        self._import_search()
        now = step.allowance.room
        costs = now.with_streams(step.merged.program, step.costs)
        priced = reprice(step.plan, step.merged.program, costs, step.machine, **self._options.swap_limits)
        room = step.room._replace(
            update_bytes=now.update_bytes,
            streams_gradients=now.streams_gradients,
            earlier_output_bytes=now.earlier_output_bytes,
        )
        return replace(step, plan=priced, room=room)

    def _keeping_all(self, request: PlanRequest, *, streams: bool = False) -> tuple[PlanRequest, CachedPlan] | None:
        """Return a plan that moves nothing if it fits with the margin of such a step only; else None."""
        allowance = self._budget.unmoved(request.allowance, request.program, streams=streams)
        unmoved = replace(request, allowance=allowance)
        if request.keeps_all or not unmoved.keeps_all:
            return None
        with suppress(PlanInfeasible, TierError):
            found = self.search(unmoved)
            if not found[1].plan.moves:  # offsets of its tensors in an arena may take more
                return found
        return None

    def _search_without_assumed(self, graphs: tuple[int, ...], request: PlanRequest) -> tuple[PlanRequest, CachedPlan]:
        """Search as `search`; assumed memory of a loss is no reason to refuse a budget."""
        program, costs = request.program, request.costs
        lean = self.losses.without_assumed(costs, program, graphs)
        try:
            return self.search(request)
        except PlanInfeasible as error:
            if lean == costs or error.needed_bytes - error.budget_bytes > loss_bytes(costs, program):
                raise  # a search takes seconds
        found = self.search(replace(request, costs=lean))
        assumed = format_bytes(loss_bytes(costs, program))
        self._notes.append(f"the budget leaves less than {assumed} to the loss: one that takes as much exceeds it")
        return found

    def _with_needed(self, request: PlanRequest) -> PlanRequest:
        """Return ``request`` with what a search for it has to know; for a step that fits as it is, that is nothing.

        The memory that stays in use is not the model's.
        """
        if request.keeps_all:
            return request
        self._import_search()
        was_measured = self._machine.now.is_measured
        with self._memory.uncounted():
            machine = self._machine.measured()
        if not was_measured:
            self._notes.extend(notes_on_sample(machine.tier(self._options.tier)))
        return request if request.machine.is_measured else replace(request, machine=machine)

    def _import_search(self) -> None:
        """Import what searches and certificates need: on a CPU 36 MiB, which are not the model's."""
        if not is_search_imported():
            with self._memory.uncounted():
                import_search()

    def _advised(self, refusal: PlanInfeasible, request: PlanRequest) -> PlanInfeasible:
        """Return ``refusal`` in the terms of the given budget, with another policy if that fits."""
        if (shares := self._budget.shares(refusal.needed_bytes, request.allowance)) is not None:
            free = format_bytes(self._budget.max_bytes)
            return refusal.but(shares=shares, instead=f"of which the device has {free} to spare")
        if request.policy == "auto":
            return refusal
        try:
            self.search(replace(request, policy="auto"))
        except (PlanInfeasible, TierError):
            return refusal
        return refusal.but(instead="policy='auto', which fits")

    @staticmethod
    def _least(refusal: PlanInfeasible, program: Program, costs: OpCosts, unmoved: Allowance) -> PlanInfeasible:
        """Return ``refusal``, or that of a step without swaps and recomputes if that needs less, with its margin."""
        peak = StepMemory(program, unmoved.room.with_streams(program, costs)).peak
        needed_bytes = unmoved.fixed_bytes + peak.nbytes
        if needed_bytes >= refusal.needed_bytes:
            return refusal
        least = refusal.but(
            needed_bytes=needed_bytes,
            where=f"op {peak.op} {program.ops[peak.op].title}",
            live=peak.live,
            parts=(*unmoved.parts, ("for the step's tensors", peak.nbytes)),
        )
        return unmoved.room.naming_update(least, program)

    @reported("planning a step", "planning")
    def _search_alternatives(self, request: PlanRequest, choices: Sequence[Retention]) -> tuple[PlanRequest, Plan]:
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
        return allowance.room.naming_update(refusal, request.program).but(
            budget_bytes=allowance.budget_bytes,
            needed_bytes=refusal.needed_bytes + allowance.fixed_bytes,
            policy=request.policy,
            parts=(*allowance.parts, ("for the step's tensors", refusal.needed_bytes)),
            unit=self._options.budget_unit,
            counted=allowance.account.counted,
            uncounted_bytes=allowance.account.uncounted_bytes,
            gradient_bytes=request.program.gradient_bytes,
            assumes_optimizer=allowance.optimizer_reserve_bytes > 0 and self._budget.assumes_optimizer,
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
