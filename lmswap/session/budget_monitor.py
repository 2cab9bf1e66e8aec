"""Warns of steps that exceeded the budget, with what held the memory; and again when the excess grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lmswap.errors import BudgetExceeded
from lmswap.ir.bytesize import format_bytes
from lmswap.runtime.step_record import EndedStep
from lmswap.session.allowance import GROWTH_BYTES, Held
from lmswap.session.context import ModelContext
from lmswap.session.diagnostics import warn
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import PlannedStep
from lmswap.session.step_sequence import RunOrder

# A second warning needs an excess that is larger than the reported one by more than this share.
_REPORTED_GROWTH = 0.25

_PREPARED = "graphs were captured, timed or planned in it"
_UNPLANNED = "it was like no step before it and followed no plan; the next like it has one"
_APART = "its graphs were planned apart, or ran in another order than they were planned for"
_NO_BACKWARD = (
    "several forwards ran and no backward, and all that they save is held until one does: call the model under "
    "torch.no_grad() where none follows"
)
_INFERENCE = "it had no backward, and nothing of a forward alone is swapped"
_GRADIENTS = "gradients of the step before still exist, and the budget leaves no room for a second set of them"
_OTHERS = "several models are enabled, and each one's budget counts what all of them hold"


class BudgetMonitor:
    """Warns of one model's steps that exceeded its budget."""

    def __init__(self, context: ModelContext, plans: StepPlans) -> None:
        self._context, self._plans = context, plans
        self._reported_bytes: dict[str, int] = {}  # excess by what was special about the step
        self._reported_held_bytes = 0  # by tensors outside of the last step that was reported
        self._prepared_in: set[int] = set()  # numbers of steps

    def mark_prepared(self, step: int) -> None:
        """Note that graphs are captured, timed or planned in ``step``."""
        self._prepared_in.add(step)

    def report(self, step: EndedStep, *, num_models: int, is_hooked: bool) -> None:
        """Warn of ``step``, which exceeded the budget, if that was not reported yet.

        ``num_models`` are enabled on the device. ``is_hooked``: hooks, not graphs, served the step.
        """
        budget, plan = self._context.budget, self._plans.get(step.follows)
        excess_bytes, held = step.peaks.used_bytes - budget.nbytes, budget.held
        holds_gradients = self._context.retention.is_short and not (plan is not None and plan.adds_up)
        around = _GRADIENTS if holds_gradients else _OTHERS if num_models > 1 else ""
        is_as_planned = plan is not None and plan.backwards == RunOrder.of(step).backwards
        special = self._special(step, is_hooked=is_hooked, is_as_planned=is_as_planned) or around
        reported = self._reported_bytes
        # An excess of a step with preparation includes all other excesses, which are reported by themselves.
        known_bytes = max(reported.values(), default=0) if special == _PREPARED else reported.get(special, 0)
        holds_more = held.nbytes > self._reported_held_bytes + GROWTH_BYTES
        has_grown = bool(reported) and holds_more and excess_bytes > known_bytes
        if excess_bytes <= (1 + _REPORTED_GROWTH) * known_bytes and not has_grown:
            return
        reported[special], self._reported_held_bytes = excess_bytes, held.nbytes
        circumstance = f". What was special: {special}" if special else ""
        is_one_of_several = 0 < step.lap_begins < step.number
        which = f"one of steps {step.lap_begins} to {step.number}" if is_one_of_several else f"step {step.number}"
        sentence = (
            f"{which} of {self._context.name} held {format_bytes(step.peaks.used_bytes)}, "
            f"{format_bytes(excess_bytes)} more than its budget of {format_bytes(budget.nbytes)} "
            f"({budget.counted}). Measured: "
            f"{'; '.join(_measured(step, held, plan))}{circumstance}. {_advice(plan)}; lmswap.report(model) shows what "
            "was planned"
        )
        warn(sentence, BudgetExceeded)

    def _special(self, step: EndedStep, *, is_hooked: bool, is_as_planned: bool) -> str | None:
        """Return what was special about ``step`` itself, if anything."""
        forwards = Counter(graph for graph, phase in step.sequence if phase == "forward")
        most = max(forwards.values(), default=0)
        if sum(forwards.values()) > 1 and not step.trains:
            return _NO_BACKWARD
        if step.number in self._prepared_in:
            return _PREPARED
        if not step.trains:
            return _INFERENCE
        if most > 1:
            return f"{most} forwards ran before their backward, and all they save is held at once"
        if not is_as_planned:
            return _UNPLANNED if is_hooked else _APART
        return None


def _advice(plan: PlannedStep | None) -> str:
    if plan is not None and plan.is_over_budget:
        less = "Its plan takes more than the budget, and none that takes less was found"
        return f"{less}: give a larger budget, or a smaller batch"
    return "Where the limit is hard, give a budget that is lower by that much, or a smaller batch"


def _measured(step: EndedStep, held: Held, plan: PlannedStep | None) -> Iterator[str]:
    """Yield the parts of the peak, which add up to it, each with its planned bytes."""
    before_bytes = min(held.nbytes, step.peaks.tensor_bytes)
    within_bytes = step.peaks.tensor_bytes - before_bytes
    other_bytes = step.peaks.used_bytes - step.peaks.tensor_bytes
    before = f"{format_bytes(before_bytes)} by tensors outside of the step when it began"
    # Its peak is that until the next one begins: what the caller reads or makes after it counts, too.
    within = f"{format_bytes(within_bytes)} by those that came since, the step's and the caller's"
    others = f"{format_bytes(other_bytes)} beside tensors"
    if plan is None:
        yield from (before, within, others)
        return
    came = f"; {format_bytes(held.came_bytes)} came in or after step {held.came_in}" if held.came_in else ""
    given = plan.made_with
    yield f"{before} (planned: {format_bytes(given.tensor_bytes + given.kept_reserve_bytes)}{came})"
    yield f"{within} (planned: {format_bytes(plan.tensor_peak_bytes)})"
    found, margin = format_bytes(given.base_bytes - given.tensor_bytes), format_bytes(given.margin_bytes)
    yield f"{others} (planned: {found} and {margin} margin)"
