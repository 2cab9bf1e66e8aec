"""Which steps held more than the budget, why, and was it said? A warning for each reason, and again when it grows."""

from __future__ import annotations

from collections import Counter

from lmswap.errors import BudgetExceeded
from lmswap.execute.step import EndedStep
from lmswap.ir.bytesize import format_bytes
from lmswap.session.notes import warn

# An excess is told of again when it is by more than this share of itself larger than what was told.
_GROWTH_TOLD = 0.25

_PREPARED = "graphs were captured, timed or planned in it, which takes memory that later steps do not need"
_UNPLANNED = "it was like no step before it and followed no plan; the next like it has one"
_APART = "its graphs were planned apart, or ran in another order than they were planned for"
_NO_BACKWARD = (
    "several forwards ran and no backward, and all that they save is held until one does: call the model under "
    "torch.no_grad() where none follows"
)
_INFERENCE = "it had no backward, and nothing of a forward alone is swapped"
_OUTSIDE = "tensors outside of the model, such as the loss's, the optimizer's or the data, took more than was expected"
_GRADIENTS = "gradients of the step before are still there, and the budget leaves no room for a second set of them"
_OTHERS = "several models are enabled, and each one's budget counts what all of them hold"


class Overruns:
    """Tells of one model's steps that exceeded its budget."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._told_bytes: dict[str, int] = {}  # excess by reason
        self._prepared_in: set[int] = set()  # numbers of steps

    def prepared_in(self, step: int) -> None:
        """In that step graphs are captured, timed or planned."""
        self._prepared_in.add(step)

    def tell(
        self,
        step: EndedStep,
        *,
        budget_bytes: int,
        num_models: int,
        is_hooked: bool,
        is_as_planned: bool,
        holds_gradients: bool,
    ) -> None:
        """Warns of ``step`` if it exceeded the budget and that was not said yet.

        ``num_models`` are enabled on the device; ``is_hooked`` says whether hooks, not graphs, served the step,
        ``is_as_planned`` whether it followed one plan, in its order, and ``holds_gradients`` whether gradients of the
        step before are held for longer than that has room for.
        """
        excess_bytes = step.peaks.used_bytes - budget_bytes
        if excess_bytes <= 0:
            return
        around = _GRADIENTS if holds_gradients else _OTHERS if num_models > 1 else _OUTSIDE
        reason = self._reason(step, is_hooked=is_hooked, is_as_planned=is_as_planned) or around
        told = self._told_bytes
        # What that takes comes on top of what else exceeds the budget: that is told of by itself, not again.
        told_bytes = max(told.values(), default=0) if reason == _PREPARED else told.get(reason, 0)
        if excess_bytes <= (1 + _GROWTH_TOLD) * told_bytes:
            return
        self._told_bytes[reason] = excess_bytes
        sentence = (
            f"step {step.number} of {self._model} held {format_bytes(step.peaks.used_bytes)}, "
            f"{format_bytes(excess_bytes)} more than its budget of {format_bytes(budget_bytes)}. Likely reason: "
            f"{reason}. Where the limit is hard, give a budget that is lower by that much, or a smaller batch; "
            "lmswap.report(model) shows what was planned"
        )
        warn(sentence, BudgetExceeded)

    def _reason(self, step: EndedStep, *, is_hooked: bool, is_as_planned: bool) -> str | None:
        """What was special about ``step`` itself, if anything."""
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
