"""The output of `lmswap plan`: one plan as text, or several as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from lmswap.cli.fit import Fit, Outcome
from lmswap.cli.step_plan import StepPlan
from lmswap.errors import PlanInfeasible, TierError
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting import make_explanation
from lmswap.reporting.text import figure_table, format_excess, format_seconds, render_text

_MOVES_WEIGHTS = (
    "Weights that move may stay over the step's end in this plan; enable fetches them in each step, which takes longer "
    "where copies limit it."
)


def plan_text(step: StepPlan, fit: Fit, *, all_buffers: bool = False) -> str:
    """Return the figures of ``step``, the plan that fits, the sizes that were tried, and the plan's largest buffers."""
    program, plan = step.program, step.plan
    table = Table.grid(padding=(0, 2))
    table.add_row("program", f"{program.name}: {len(program.ops)} ops, {len(program.buffers)} buffers")
    table.add_row("machine", step.machine.name)
    table.add_row("policy", f"{plan.policy}, planned in {format_seconds(step.planning_seconds)}")
    table.add_row("peak", f"{format_bytes(step.peak_bytes)} of a budget of {format_bytes(step.budget_bytes)}")
    table.add_row("budget", _counted_memory(step))
    for text in (fit.note, step.note, _MOVES_WEIGHTS * step.moves_weights):
        if text:
            table.add_row("note", text)
    table.add_row("step", f"{format_seconds(plan.predicted_seconds)} (predicted from the machine's rates)")
    table.add_row("bound", f"{format_seconds(step.bound_seconds)}: {format_excess(plan.excess)}")
    for row in _rows(step):
        table.add_row(*row)
    explanation = make_explanation(program, plan, policy=plan.policy, all_buffers=all_buffers)
    sizes = (_sizes_table(fit), Text()) if fit.batches else ()
    return render_text(table, Text(), *sizes, explanation.tables())


def budgets_text(fits: Sequence[Fit]) -> str:
    """Return a table with a row for each budget."""
    outcomes = [fit.outcome for fit in fits]
    tier = next((tier for step in outcomes if isinstance(step, StepPlan) for tier in step.plan.tier_bytes), "tier")
    batch = ("batch", "a sample") if any(fit.batches for fit in fits) else ("step",)
    table = figure_table("budget", *batch, "ratio", "bound", "in", "out", tier, gap=1)
    for fit, outcome in zip(fits, outcomes, strict=True):
        table.add_row(fit.budget, *_row(fit, fit.size), *_traffic(outcome))
    notes = ["Ratio and bound: seconds of the plan, and the least of any, over those in unlimited memory."]
    if fits[0].note:
        notes.append(f"The steps were {fits[0].note}.")
    if any(isinstance(step, StepPlan) and step.moves_weights for step in outcomes):
        notes.append(_MOVES_WEIGHTS)
    notes += [f"{fit.budget}: {fit.outcome}" for fit in fits if isinstance(fit.outcome, TierError)]
    return render_text(table, Text(), *notes)


def _sizes_table(fit: Fit) -> Table:
    table = figure_table("batch", "a sample", "ratio", "bound")
    for size in fit.batches:
        table.add_row(*_row(fit, size))
    return table


def _row(fit: Fit, size: int) -> Iterator[str]:
    """Yield the batch, if it was searched, the seconds, and their ratios to those in unlimited memory."""
    outcome = fit.tried[size]
    if fit.batches:
        yield fit.batches[size]
    if not isinstance(outcome, StepPlan):
        needed = f"needs {format_bytes(outcome.needed_bytes)}" if isinstance(outcome, PlanInfeasible) else "–"
        yield from (needed, "–", "–")
        return
    seconds = fit.seconds_per_sample(size) if fit.batches else outcome.plan.predicted_seconds
    yield format_seconds(seconds or 0.0)
    yield from outcome.ratios()


def _traffic(outcome: Outcome) -> Iterator[str]:
    """Yield bytes in and out, and in the tier."""
    if not isinstance(outcome, StepPlan):
        yield from ("–", "–", "–")
        return
    copied = outcome.copied_bytes().values()
    yield format_bytes(sum(in_bytes for in_bytes, _ in copied))
    yield format_bytes(sum(out_bytes for _, out_bytes in copied))
    yield format_bytes(sum(outcome.plan.tier_bytes.values()))


def _rows(step: StepPlan) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of what the step is compared with, and what it copies."""
    if step.roofline_seconds:
        share = step.roofline_seconds / step.plan.predicted_seconds
        allowed = f"{100 * share:.0f} % of what the hardware allows"
        yield "roofline", f"{format_seconds(step.roofline_seconds)} for its FLOPs alone: {allowed}"
    if step.program.is_cyclic:
        yield "speed", f"{step.ratios()[0]} x a device without a limit"
        parts = (f"{format_bytes(nbytes)} {name}" for name, nbytes in step.state_bytes().items())
        yield "whole step", ", ".join(parts)
    for tier, (in_bytes, out_bytes) in step.copied_bytes().items():
        is_disk = tier == "disk"
        copies = f"{format_bytes(in_bytes)} {'read' if is_disk else 'in'} and {format_bytes(out_bytes)} "
        copies += f"{'written' if is_disk else 'out'} a step"
        yield "disk" if is_disk else "link", f"{copies}, to {format_bytes(step.plan.tier_bytes[tier])} of tier '{tier}'"


def _counted_memory(step: StepPlan) -> str:
    """Return what the budget counts."""
    fixed, plan = step.program.fixed, step.plan
    if fixed is None:
        return "the step's tensors only: the file does not say what else the device holds"
    is_unmoved = plan.budget_bytes == step.budget_bytes - fixed.total_bytes(is_unmoved=True)
    parts = (*fixed.parts(is_unmoved=is_unmoved), ("for the step's tensors", plan.budget_bytes))
    total = " + ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts if nbytes)
    if step.program.is_cyclic:
        return f"{total}, with parameters, gradients and optimizer state"
    as_enabled = "counted as by lmswap.enable" if fixed.margin_bytes else ""
    return "; ".join(filter(None, (total, ": ".join(filter(None, (as_enabled, fixed.counted))))))
