"""The report's text: its sentences and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Decision
from lmswap.ir.timeline import Lane
from lmswap.reporting.step import StepFigures
from lmswap.reporting.text import figure_table, format_error, format_longer, format_seconds

_NOT_YET = "not yet measured"


def summarize(step: StepFigures) -> Group:
    """Return the report's parts: state of the step, figures, budget, and notes."""
    steps = (
        f"after {step.steps} step{'' if step.steps == 1 else 's'}" if step.steps else "before the end of the first step"
    )
    gain = _saving(step)
    parts: list[RenderableType] = [
        Text(f"lmswap report: {step.model} on {step.device}, {steps}", style="bold"),
        *([Text(gain)] if gain else []),
        Text(_state(step)),
        *(Text(sentence) for sentence in _plan(step, with_cost=not gain)),
        *([Text(_emulation(step))] if step.emulated_link is not None else []),
        Text(),
        *_figures_if_known(step),
        Text(_budget(step) if step.verified is None else "The budget is not kept while verifying."),
    ]
    if step.measured is not None:
        parts.append(Text(_measured_step(step)))
    parts.extend(Text(sentence) for sentence in _host_bound(step))
    if step.verified is not None:
        parts.append(Text(f"Verified: {step.verified}."))
    parts.extend(Text(f"Note: {note}") for note in step.notes)
    return Group(*parts)


def _figures_if_known(step: StepFigures) -> Iterator[RenderableType]:
    if step.predicted is not None or step.measured is not None:
        yield from (_figures(step), Text())


def figures_of(step: StepFigures) -> list[tuple[str, str]]:
    """Return the main figures by name: peak, budget, saved bytes, and step time."""
    figures = [("peak", _both(format_bytes, step.predicted_peak_bytes, step.measured_peak_bytes))]
    if step.verified is None:
        figures.append(("budget", f"{format_bytes(step.budget_bytes)} ({step.counted})"))
    if (saved_bytes := _saved_bytes(step)) is not None:
        figures.append(("saved", format_bytes(saved_bytes)))
    return [*figures, ("step", _both(format_seconds, step.predicted_seconds, step.measured_seconds))]


def _both(write: Callable[[Any], str], predicted: float | None, measured: float | None) -> str:
    expected = f"{write(predicted)} predicted" if predicted is not None else "not predicted"
    return expected if measured is None else f"{write(measured)}, {expected}"


def _saved_bytes(step: StepFigures) -> int | None:
    """Return by how much the measured peak is below that without a plan; None where nothing is saved."""
    peak_bytes, unplanned_bytes = step.measured_peak_bytes, step.unplanned_peak_bytes
    has_moved = step.swapped_out_bytes or step.swapped_in_bytes or step.recomputed_bytes
    if step.verified is not None or not has_moved or peak_bytes is None or unplanned_bytes is None:
        return None
    return unplanned_bytes - peak_bytes if peak_bytes < unplanned_bytes else None


def _saving(step: StepFigures) -> str:
    """Return what the plan saves and costs, "" where nothing is saved."""
    saved_bytes, peak_bytes = _saved_bytes(step), step.measured_peak_bytes
    if saved_bytes is None or peak_bytes is None:
        return ""
    saved, peak, unplanned = map(format_bytes, (saved_bytes, peak_bytes, peak_bytes + saved_bytes))
    longer = format_longer(step.predicted_seconds, step.free_seconds)
    cost = f"; step {longer} longer" if longer else ""
    return f"Saves {saved}: peak {peak} instead of {unplanned} (predicted without a plan){cost}."


def _state(step: StepFigures) -> str:
    if step.predicted is None:
        return _unplanned_state(step)
    swapped = [row for row in step.decisions if row.decision is Decision.SWAP]
    recomputed = [row for row in step.decisions if row.decision is Decision.RECOMPUTE]
    recomputed_bytes = format_bytes(sum(row.nbytes for row in recomputed))
    if not swapped and recomputed:
        which = f"{recomputed_bytes} ({len(recomputed)} of {len(step.decisions)} buffers)"
        return f"Nothing is swapped: policy '{step.policy}' recomputes {which}."
    if not swapped:
        why = (
            "this policy never swaps"
            if step.policy == "none"
            else f"the whole step fits the budget of {format_bytes(step.budget_bytes)} as it is"
        )
        return f"Swapping is off (policy '{step.policy}'): {why}."
    planned = f"policy '{step.policy}' swaps {' and '.join(_swapped(step))} to the {step.tier} tier" + (
        f" and recomputes {recomputed_bytes} ({len(recomputed)})" if recomputed else ""
    )
    if step.swapped_out_bytes is None:
        return f"Swapping is planned, not yet run: {planned}."
    if step.swapped_out_bytes == 0 and step.swapped_in_bytes == 0:
        return f"Swapping did NOT happen in step {step.step}, although {planned}."
    return f"Swapping is on: {planned}."


def _swapped(step: StepFigures) -> Iterator[str]:
    """Yield what the plan swaps: bytes and number of buffers, weights apart."""
    for is_weight, what in ((False, "buffers"), (True, "weights")):
        rows = [row for row in step.decisions if row.is_weight is is_weight]
        swapped = [row for row in rows if row.decision is Decision.SWAP]
        if swapped:
            yield f"{format_bytes(sum(row.nbytes for row in swapped))} ({len(swapped)} of {len(rows)} {what})"


def _unplanned_state(step: StepFigures) -> str:
    if step.swapped_out_bytes:
        return f"Swapping is on, without a plan: no earlier step matches step {step.step}; the next that does has one."
    if step.step is not None:
        fits = step.measured_peak_bytes is not None and step.measured_peak_bytes <= step.budget_bytes
        why = (
            f"it fits the budget of {format_bytes(step.budget_bytes)} as it is" if fits else "it has no plan of its own"
        )
        return f"Nothing was swapped in step {step.step}: {why}."
    return "Swapping: not decided yet; no step has ended."


def _measured_step(step: StepFigures) -> str:
    """Return which step the measured figures are of, and what ran since."""
    kind = "the last with a backward" if step.trains else "which had no backward, as none so far"
    error = "; error = predicted / measured - 1" if step.predicted is not None else ""
    text = f"Measured in step {step.step}, {kind}{error}."
    later = step.steps - (step.step or 0)
    if later:
        text += f" Since then the model ran {later} time{'' if later == 1 else 's'} without one, as in validation."
    return text


def _host_bound(step: StepFigures) -> Iterator[str]:
    if step.own_seconds is not None:
        own = f"lmswap's own time was {format_seconds(step.own_seconds)} without planning"
        yield f"{own}, on the host, in addition to the step."
    waits = step.predicted.lane_seconds(Lane.HOST) if step.predicted is not None else 0.0
    if waits:
        yield f"The device is predicted to wait {format_seconds(waits)} for the host to queue ops and copies."
    if step.host_bound_seconds and step.measured_seconds:
        share = min(step.host_bound_seconds / step.measured_seconds, 1.0)
        yield (
            f"Host-bound for {100 * share:.0f} % of the step: the device had run its ops as soon as the host had "
            "queued them. There a swap costs what it costs the host, hidden or not."
        )


def _plan(step: StepFigures, *, with_cost: bool) -> Iterator[str]:
    """Yield the plan's origin, its cost, and its use of the tier; `explain` has the reasons."""
    if step.predicted_seconds is None:
        return
    longer = format_longer(step.predicted_seconds, step.free_seconds)
    cost = f"; costs {longer} over unlimited memory" if longer and with_cost else ""
    not_final = "" if step.is_final else ", not final yet"
    yield f"Plan: {step.plan_origin}{not_final}{cost}."
    if step.tier_reserved_bytes:
        took = format_seconds(step.tier_reserve_seconds)
        yield f"The {step.tier} tier has {format_bytes(step.tier_reserved_bytes)}, reserved in {took}."
    if step.tier == "compressed" and step.tier_resident_bytes:
        taken, held = format_bytes(step.tier_resident_bytes), format_bytes(step.tier_highest_bytes)
        yield f"Swapped tensors took {taken} of host memory for {held}."


def _emulation(step: StepFigures) -> str:
    ways = (("out", step.out_bytes_per_second), ("in", step.in_bytes_per_second))
    achieved = ", ".join(f"{rate / 1e9:.3g} GB/s {way}" for way, rate in ways if rate is not None)
    return f"Link EMULATED: {step.emulated_link}; achieved: {achieved or 'nothing copied yet'}."


def _figures(step: StepFigures) -> Table:
    table = figure_table("", "predicted", "measured", "error", gap=3)
    predicted = step.predicted
    out, in_, stall = (
        (predicted.lane_bytes(Lane.OUT), predicted.lane_bytes(Lane.IN), predicted.lane_seconds(Lane.STALL))
        if predicted is not None
        else (None, None, None)
    )
    table.add_row("peak", *_bytes(step.predicted_peak_bytes, step.measured_peak_bytes))
    if step.measured_tensor_peak_bytes is not None:
        table.add_row("  of it tensors", "", format_bytes(step.measured_tensor_peak_bytes), "")
    table.add_row("step", *_seconds(step.predicted_seconds, step.measured_seconds))
    table.add_row("  of it stalled", *_stalls(step, stall))
    table.add_row("swapped out", *_bytes(out, step.swapped_out_bytes))
    table.add_row("swapped in", *_bytes(in_, step.swapped_in_bytes))
    if step.state_copied_out_bytes:
        table.add_row("training state out", *_bytes(step.state_copied_out_bytes, step.state_out_bytes))
        table.add_row("training state in", *_bytes(step.state_copied_in_bytes, step.state_in_bytes))
    if step.recomputed_bytes:
        table.add_row("recomputed", "", format_bytes(step.recomputed_bytes), "")
    held_bytes = step.tier_peak_bytes if step.measured is not None else None
    table.add_row(f"{step.tier} tier, peak", *_bytes(step.tier_planned_bytes, held_bytes))
    if step.tier_highest_bytes > step.tier_peak_bytes:
        table.add_row("  highest so far", "", format_bytes(step.tier_highest_bytes), "")
    return table


def _budget(step: StepFigures) -> str:
    budget = f"Budget {format_bytes(step.budget_bytes)} ({step.counted})"
    if step.predicted is None:
        return f"{budget}."
    for_step = step.budget_bytes - sum(nbytes for _, nbytes in step.budget_parts)
    named = (*step.budget_parts, ("for the step's tensors", for_step))
    parts = " + ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in named if nbytes > 0)
    gradients = f" (gradients among them: {format_bytes(step.gradient_bytes)})" if step.gradient_bytes else ""
    text = f"{budget} = {parts}{gradients}."
    if for_step < 0:
        text = f"{budget} leaves nothing for the step's tensors: {parts} are {format_bytes(-for_step)} more."
    if step.excluded_bytes:
        parameters = f" (the parameters are {format_bytes(step.uncounted_bytes)} of it)" if step.uncounted_bytes else ""
        what = f"what was resident before{parameters}, and code loaded since"
        text += f"\nThe process holds {format_bytes(step.excluded_bytes)} more, which do not count: {what}."
    if step.trace_bytes:
        traces = f"{step.num_traces} trace{'' if step.num_traces == 1 else 's'}"
        if step.num_sized_plans:
            traces += f" and {step.num_sized_plans} plan{'' if step.num_sized_plans == 1 else 's'} for sizes that vary"
        evicted = f"; {step.num_evicted_traces} used least recently were evicted" if step.num_evicted_traces else ""
        text += f"\nOf what is in use before steps, {format_bytes(step.trace_bytes)} came with {traces}{evicted}."
    if step.host_budget_bytes is not None:
        planned = f"the plan uses {format_bytes(step.tier_planned_bytes or 0)} of the {step.tier} tier"
        text += f"\nHost budget {format_bytes(step.host_budget_bytes)}: {planned}."
    measured = None if step.measured_peak_bytes is None else _against_budget(step, step.measured_peak_bytes)
    if measured is not None:
        text += f"\nThe measured peak is {measured}."
    if step.highest_peak_bytes is not None and step.highest_peak_bytes > (step.measured_peak_bytes or 0):
        highest = f"{format_bytes(step.highest_peak_bytes)}, in step {step.highest_peak_step}"
        of_budget = _against_budget(step, step.highest_peak_bytes)
        if of_budget != measured:
            text += f"\nThe highest peak so far was {highest}: {of_budget}."
    return text


def _against_budget(step: StepFigures, peak_bytes: int) -> str:
    if peak_bytes > step.budget_bytes:
        return f"OVER the budget by {format_bytes(peak_bytes - step.budget_bytes)}"
    return f"{100 * peak_bytes / step.budget_bytes:.0f} % of the budget"


def _bytes(predicted: int | None, measured: int | None) -> tuple[str, str, str]:
    return (
        "–" if predicted is None else format_bytes(predicted),
        _NOT_YET if measured is None else format_bytes(measured),
        format_error(predicted, measured),
    )


def _stalls(step: StepFigures, predicted: float | None) -> tuple[str, str, str]:
    """Return the row of stalled seconds, without an error where stalls are below 1 % of the step."""
    cells = _seconds(predicted, step.stall_seconds)
    longest = max(predicted or 0.0, step.stall_seconds or 0.0)
    return cells if longest >= 0.01 * (step.measured_seconds or 0.0) else (*cells[:2], "–")


def _seconds(predicted: float | None, measured: float | None) -> tuple[str, str, str]:
    return (
        "–" if predicted is None else format_seconds(predicted),
        _NOT_YET if measured is None else format_seconds(measured),
        format_error(predicted, measured),
    )
