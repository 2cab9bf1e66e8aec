"""The output of `lmswap plan`: one plan as text, or several as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from lmswap.cli.step_plan import KINDS, StepPlan
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting import make_explanation
from lmswap.reporting.text import format_excess, format_seconds, render_text


def plan_text(step: StepPlan, *, all_buffers: bool = False, note: str = "", largest: Sequence[Table] = ()) -> str:
    """Return the figures of a plan, and its largest buffers; ``largest`` is printed between them."""
    program, plan = step.program, step.plan
    table = Table.grid(padding=(0, 2))
    table.add_row("program", f"{program.name}: {len(program.ops)} ops, {len(program.buffers)} buffers")
    table.add_row("machine", step.machine.name)
    table.add_row("policy", f"{plan.policy}, planned in {format_seconds(step.planning_seconds)}")
    table.add_row("peak", f"{format_bytes(step.peak_bytes)} of a budget of {format_bytes(step.budget_bytes)}")
    table.add_row("budget", _counted_memory(step))
    for text in filter(None, (note, step.note)):
        table.add_row("note", text)
    table.add_row("step", f"{format_seconds(plan.predicted_seconds)} (predicted from the machine's rates)")
    table.add_row("bound", f"{format_seconds(step.bound_seconds)}: {format_excess(plan.excess)}")
    for row in _rows(step):
        table.add_row(*row)
    explanation = make_explanation(program, plan, policy=plan.policy, all_buffers=all_buffers)
    return render_text(table, Text(), *(part for found in largest for part in (found, Text())), explanation.tables())


def _rows(step: StepPlan) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of what the step is compared with, and what it copies."""
    if step.roofline_seconds:
        share = step.roofline_seconds / step.plan.predicted_seconds
        yield "roofline", f"{format_seconds(step.roofline_seconds)}: {share:.0%} of the FLOP/s that the machine allows"
    if step.program.is_cyclic:
        yield "speed", f"{step.ratio:.3f} x a device without a limit"
        parts = (f"{format_bytes(step.program.bytes_of(kind))} {name}" for kind, name in KINDS.items())
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
    counted = f": {fixed.counted}" if fixed.counted else ""
    return f"{total}; counted as by lmswap.enable{counted}"
