"""What swapping does to a model's training step: bytes, peak, seconds and stalls, predicted beside measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Timeline
from lmswap.ir.verified import Verified
from lmswap.reporting.chrome import write_chrome_trace
from lmswap.reporting.decisions import BufferDecision, buffer_decisions
from lmswap.reporting.metrics import PREFIX, metrics_of
from lmswap.reporting.page import write_page
from lmswap.reporting.picture import write_picture
from lmswap.reporting.text import format_error, format_excess, format_seconds, render_html, render_text

SCHEMA = "lmswap.report/3"


@dataclass(frozen=True)
class Report:
    """One model's step as planned and as it ran.

    Predicted fields are None until the step is captured and planned, and where it followed no plan, measured ones until
    a step has finished. They are of step number ``step``: the last that had a backward, or, if none of the ``steps`` so
    far had one, the last; ``trains`` says which. Measured peaks are of all that happened from the end of the step
    before it to its own end; the highest so far was ``highest_peak_bytes``, in step ``highest_peak_step``.

    The budget is made of what was there before the step (``base_bytes``), an allowance for the allocator and for
    scratch of kernels (``reserve_bytes``), a margin that stays free (``margin_bytes``), and the rest, which the plan
    fills. Peaks and memory curves count like the budget: base and reserve are part of the predicted ones.
    ``measured_tensor_peak_bytes`` is the part of the measured peak that tensors held, None where it is not known. Tier
    bytes are what the plan needs there, what the tier holds now, held at most in that step and has ever held, and what
    is reserved for that, which took ``tier_reserve_seconds``; ``host_budget_bytes`` is what it may hold.

    Of the measured seconds the device spent ``host_bound_seconds`` in a forward or backward that it had run as soon as
    the host had queued it; None on a CPU, which is both.

    ``emulated_link`` is what copies were paced to, None where they ran at the machine's own speed;
    ``out_bytes_per_second`` and ``in_bytes_per_second`` are what they reached while at least one was under way. The
    step would take ``free_seconds`` with unlimited memory, and no plan is faster than ``bound_seconds`` while ops keep
    their order; ``plan_origin`` says where the plan comes from: "made in 1.2 s", "from cache". ``verified`` is what
    verification has checked, None where it was not asked for.
    """

    model: str
    device: str
    policy: str
    plan_origin: str
    tier: str
    emulated_link: EmulatedLink | None
    host_budget_bytes: int | None
    budget_bytes: int
    base_bytes: int
    reserve_bytes: int
    margin_bytes: int
    steps: int
    step: int | None
    trains: bool
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    measured_tensor_peak_bytes: int | None
    highest_peak_bytes: int | None
    highest_peak_step: int | None
    predicted_seconds: float | None
    measured_seconds: float | None
    free_seconds: float | None
    bound_seconds: float | None
    swapped_out_bytes: int | None
    swapped_in_bytes: int | None
    out_bytes_per_second: float | None
    in_bytes_per_second: float | None
    recomputed_bytes: int | None
    stall_seconds: float | None
    host_bound_seconds: float | None
    tier_planned_bytes: int | None
    tier_used_bytes: int
    tier_peak_bytes: int
    tier_highest_bytes: int
    tier_reserved_bytes: int
    tier_reserve_seconds: float
    decisions: tuple[BufferDecision, ...]
    verified: Verified | None
    notes: tuple[str, ...]
    predicted: Timeline | None
    measured: Timeline | None

    def __rich__(self) -> Group:
        """The report's parts, for `rich.print`."""
        steps = f"after {self.steps} step{'' if self.steps == 1 else 's'}" if self.steps else "before the first step"
        parts: list[RenderableType] = [
            Text(f"lmswap report: {self.model} on {self.device}, {steps}", style="bold"),
            Text(self._state()),
            *([Text(self._quality())] if self.predicted_seconds is not None else []),
            *([Text(self._emulation())] if self.emulated_link is not None else []),
            Text(),
            self._figures(),
            Text(),
            Text(self._budget()),
        ]
        if self.measured is not None:
            parts.append(Text(self._whose()))
        if self.host_bound_seconds and self.measured_seconds:
            parts.append(Text(self._host(self.host_bound_seconds / self.measured_seconds)))
        if self.verified is not None:
            parts.append(Text(f"Verified: {self.verified}."))
        parts.extend(Text(f"Note: {note}") for note in self.notes)
        return Group(*parts)

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)

    def __repr__(self) -> str:
        return f"<report of {self.model} after {self.steps} steps; print it, or see its fields>"

    def to_json(self) -> str:
        """Every field as JSON text, schema "lmswap.report/3"; sizes in bytes, times in seconds."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def metrics(self, prefix: str = PREFIX) -> dict[str, int | float]:
        """Its figures as plain numbers for an experiment tracker, "lmswap/peak_bytes" and so on; those there are yet.

        Example:
            >>> accelerator.log(lmswap.report(model).metrics(), step=step)
        """
        return metrics_of(self, prefix)

    def plot(self, path: str | Path) -> None:
        """Draws memory over time and what ran on each lane, predicted above measured, as .png, .svg or .pdf.

        Raises:
            OptionError: nothing to draw yet, an unknown ending, or a folder that does not exist.
        """
        title = f"{self.model} on {self.device}: policy {self.policy}, tier {self.tier}"
        peaks = {"predicted": self.predicted_peak_bytes, "measured": self.measured_peak_bytes}
        write_picture(Path(path), self._timelines(), title=title, budget_bytes=self.budget_bytes, peak_bytes=peaks)

    def to_html(self, path: str | Path) -> None:
        """Writes a page on the step that answers when pointed at: memory, lanes, and the life of each large buffer.

        It needs no network; plotly writes it (``pip install 'lmswap[page]'``).

        Raises:
            OptionError: nothing to draw yet, an ending that is not .html, a folder that does not exist, or no plotly.
        """
        title = f"{self.model} on {self.device}: policy {self.policy}, tier {self.tier}"
        write_page(Path(path), self._timelines(), self.decisions, title=title, budget_bytes=self.budget_bytes)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes both timelines in the trace event format, which Perfetto and chrome://tracing open.

        Raises:
            OptionError: nothing to write yet, or a folder that does not exist.
        """
        write_chrome_trace(
            Path(path), self._timelines(), about={"model": self.model, "budget_bytes": self.budget_bytes}
        )

    def _timelines(self) -> tuple[Timeline, ...]:
        return tuple(timeline for timeline in (self.predicted, self.measured) if timeline is not None)

    def _state(self) -> str:
        if self.predicted is None:
            return self._unplanned_state()
        swapped = [row for row in self.decisions if row.decision is Decision.SWAP]
        remade = [row for row in self.decisions if row.decision is Decision.RECOMPUTE]
        again = f"computes {len(remade)}, {format_bytes(sum(row.nbytes for row in remade))}, again"
        if not swapped and remade:
            return f"Swapping is off (policy '{self.policy}'): of {len(self.decisions)} buffers it {again}."
        if not swapped:
            why = (
                "this policy never swaps"
                if self.policy == "none"
                else f"the whole step fits the budget of {format_bytes(self.budget_bytes)} as it is"
            )
            return f"Swapping is off (policy '{self.policy}'): {why}."
        planned = (
            f"policy '{self.policy}' sends {len(swapped)} of {len(self.decisions)} buffers, "
            f"{format_bytes(sum(row.nbytes for row in swapped))}, to the {self.tier} tier"
            + (f" and {again}" if remade else "")
        )
        if self.swapped_out_bytes is None:
            return f"Swapping is planned, not yet run: {planned}."
        if self.swapped_out_bytes == 0:
            return f"Swapping did NOT happen in step {self.step}, although {planned}."
        return f"Swapping is on: {planned}."

    def _unplanned_state(self) -> str:
        if self.swapped_out_bytes:
            return (
                f"Swapping is on, without a plan: step {self.step} was like none before it; the next like it has one."
            )
        if self.step is not None:
            return f"Swapping: step {self.step} followed no plan of its own, and swapped nothing."
        return "Swapping: not decided yet; the first step is captured and planned when it runs."

    def _whose(self) -> str:
        """Which step the measured figures are of, and what ran since."""
        kind = "the last with a backward" if self.trains else "which had no backward, as none so far"
        text = f"Measured figures are of step {self.step}, {kind}."
        later = self.steps - (self.step or 0)
        if later:
            text += f" Since then the model ran {later} time{'' if later == 1 else 's'} without one, as in validation."
        if self.predicted is not None:
            text += " Error: of the prediction, against the measurement."
        return text

    @staticmethod
    def _host(share: float) -> str:
        return (
            f"Host-bound for {100 * min(share, 1.0):.0f} % of the step: the device had run its ops as soon as the host "
            "had queued them. There a swap costs what it costs the host, hidden or not, which no plan counts."
        )

    def _quality(self) -> str:
        assert self.predicted_seconds is not None
        excess = self.predicted_seconds / self.bound_seconds - 1 if self.bound_seconds else None
        over = ""
        if self.free_seconds:
            share = max(0.0, self.predicted_seconds / self.free_seconds - 1)
            over = f"{100 * share:.1f} % over unlimited memory, "
        step = f"step {format_seconds(self.predicted_seconds)}, {over}{format_excess(excess)}"
        text = f"Plan: {self.plan_origin}; {step}."
        if self.tier_reserved_bytes:
            took = format_seconds(self.tier_reserve_seconds)
            text += f"\nThe {self.tier} tier has {format_bytes(self.tier_reserved_bytes)}, reserved in {took}."
        return text

    def _emulation(self) -> str:
        ways = (("out", self.out_bytes_per_second), ("in", self.in_bytes_per_second))
        achieved = ", ".join(f"{rate / 1e9:.3g} GB/s {way}" for way, rate in ways if rate is not None)
        return f"Link EMULATED: {self.emulated_link}; achieved: {achieved or 'nothing copied yet'}."

    def _figures(self) -> Table:
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        table.add_column("")
        for heading in ("predicted", "measured", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        predicted = self.predicted
        out, in_, stall = (
            (predicted.lane_bytes(Lane.OUT), predicted.lane_bytes(Lane.IN), predicted.lane_seconds(Lane.STALL))
            if predicted is not None
            else (None, None, None)
        )
        table.add_row("peak", *_bytes(self.predicted_peak_bytes, self.measured_peak_bytes))
        if self.measured_tensor_peak_bytes is not None:
            table.add_row("  of it tensors", "", format_bytes(self.measured_tensor_peak_bytes), "")
        table.add_row("step", *_seconds(self.predicted_seconds, self.measured_seconds))
        table.add_row("  of it stalled", *_seconds(stall, self.stall_seconds))
        table.add_row("swapped out", *_bytes(out, self.swapped_out_bytes))
        table.add_row("swapped in", *_bytes(in_, self.swapped_in_bytes))
        if self.recomputed_bytes:
            table.add_row("recomputed", "", format_bytes(self.recomputed_bytes), "")
        held_bytes = self.tier_peak_bytes if self.measured is not None else None
        table.add_row(f"{self.tier} tier, peak", *_bytes(self.tier_planned_bytes, held_bytes))
        if self.tier_highest_bytes > self.tier_peak_bytes:
            table.add_row("  highest so far", "", format_bytes(self.tier_highest_bytes), "")
        return table

    def _budget(self) -> str:
        if self.predicted is None:
            return f"Budget {format_bytes(self.budget_bytes)}."
        for_step = self.budget_bytes - self.base_bytes - self.reserve_bytes - self.margin_bytes
        parts = [
            f"{format_bytes(nbytes)} {what}"
            for nbytes, what in (
                (self.base_bytes, "before the step"),
                (self.reserve_bytes, "reserve"),
                (self.margin_bytes, "margin"),
                (for_step, "for the step's tensors"),
            )
            if nbytes > 0
        ]
        text = f"Budget {format_bytes(self.budget_bytes)} = {' + '.join(parts)}."
        if for_step < 0:
            taken = f"{' + '.join(parts)} are {format_bytes(-for_step)} more"
            text = f"Budget {format_bytes(self.budget_bytes)} leaves nothing for the step's tensors: {taken}."
        if self.host_budget_bytes is not None:
            planned = f"the plan uses {format_bytes(self.tier_planned_bytes or 0)} of the {self.tier} tier"
            text += f"\nHost budget {format_bytes(self.host_budget_bytes)}: {planned}."
        if self.measured_peak_bytes is not None:
            text += f"\nThe measured peak is {self._against_budget(self.measured_peak_bytes)}."
        if self.highest_peak_bytes is not None and self.highest_peak_bytes > (self.measured_peak_bytes or 0):
            highest = f"{format_bytes(self.highest_peak_bytes)}, in step {self.highest_peak_step}"
            text += f"\nThe highest peak so far was {highest}: {self._against_budget(self.highest_peak_bytes)}."
        return text

    def _against_budget(self, peak_bytes: int) -> str:
        if peak_bytes > self.budget_bytes:
            return f"OVER the budget by {format_bytes(peak_bytes - self.budget_bytes)}"
        return f"{100 * peak_bytes / self.budget_bytes:.0f} % of the budget"


def make_report(
    *,
    model: str,
    device: str,
    policy: str,
    tier: str,
    budget_bytes: int,
    plan_origin: str = "",
    emulated_link: EmulatedLink | None = None,
    host_budget_bytes: int | None = None,
    base_bytes: int = 0,
    reserve_bytes: int = 0,
    margin_bytes: int = 0,
    program: Program | None = None,
    plan: Plan | None = None,
    predicted: Timeline | None = None,
    placed_bytes: int | None = None,
    free_seconds: float | None = None,
    steps: int = 0,
    step: int | None = None,
    trains: bool = False,
    measured: Timeline | None = None,
    measured_peak_bytes: int | None = None,
    measured_tensor_peak_bytes: int | None = None,
    host_bound_seconds: float | None = None,
    highest_peak_bytes: int | None = None,
    highest_peak_step: int | None = None,
    tier_used_bytes: int = 0,
    tier_peak_bytes: int = 0,
    tier_highest_bytes: int = 0,
    tier_reserved_bytes: int = 0,
    tier_reserve_seconds: float = 0.0,
    notes: Sequence[str] = (),
    verified: Verified | None = None,
) -> Report:
    """Builds the report of one model from what the stages left; arguments are its fields of that name.

    ``model`` and ``device`` are names for people, "UNet3d" and "cuda:0 (NVIDIA H200)"; ``policy`` is the one asked for,
    whatever way the plan was found in. ``program``, ``plan`` and ``predicted`` (the simulator's timeline,
    whose memory counts what the step itself allocates) come together or not at all, before the first step; where its
    tensors have planned places on the device, these take ``placed_bytes``.
    ``measured`` is step number ``step``, its memory counted like the budget, empty where it was not recorded.
    ``notes`` are sentences for people, such as a module that runs uncaptured and why.
    """
    fixed = base_bytes + reserve_bytes
    if predicted is not None:
        raised = tuple((seconds, nbytes + fixed) for seconds, nbytes in predicted.memory)
        predicted = Timeline(predicted.source, predicted.spans, raised)
    return Report(
        model=model,
        device=device,
        policy=policy,
        plan_origin=plan_origin,
        tier=tier,
        emulated_link=emulated_link,
        host_budget_bytes=host_budget_bytes,
        budget_bytes=budget_bytes,
        base_bytes=base_bytes,
        reserve_bytes=reserve_bytes,
        margin_bytes=margin_bytes,
        steps=steps,
        step=step,
        trains=trains,
        predicted_peak_bytes=_predicted_peak(predicted, placed_bytes, fixed),
        measured_peak_bytes=measured_peak_bytes,
        measured_tensor_peak_bytes=measured_tensor_peak_bytes,
        highest_peak_bytes=highest_peak_bytes,
        highest_peak_step=highest_peak_step,
        predicted_seconds=plan.predicted_seconds if plan is not None else None,
        measured_seconds=_graph_seconds(measured) if measured is not None else None,
        free_seconds=free_seconds,
        bound_seconds=plan.certificate.seconds if plan is not None and plan.certificate is not None else None,
        swapped_out_bytes=measured.lane_bytes(Lane.OUT) if measured is not None else None,
        swapped_in_bytes=measured.lane_bytes(Lane.IN) if measured is not None else None,
        out_bytes_per_second=_bytes_per_second(measured, Lane.OUT),
        in_bytes_per_second=_bytes_per_second(measured, Lane.IN),
        recomputed_bytes=_remade_bytes(program, plan) if measured is not None else None,
        stall_seconds=measured.lane_seconds(Lane.STALL) if measured is not None else None,
        host_bound_seconds=host_bound_seconds,
        tier_planned_bytes=plan.tier_bytes.get(tier, 0) if plan is not None else None,
        tier_used_bytes=tier_used_bytes,
        tier_peak_bytes=tier_peak_bytes,
        tier_highest_bytes=tier_highest_bytes,
        tier_reserved_bytes=tier_reserved_bytes,
        tier_reserve_seconds=tier_reserve_seconds,
        decisions=buffer_decisions(program, plan, predicted) if program is not None and plan is not None else (),
        verified=verified,
        notes=tuple(notes),
        predicted=predicted,
        measured=measured,
    )


def _predicted_peak(predicted: Timeline | None, placed_bytes: int | None, fixed_bytes: int) -> int | None:
    """Of a step in an arena, which is there as a whole whatever tensors hold of it, or else of the raised timeline."""
    if predicted is None:
        return None
    return predicted.peak_bytes if placed_bytes is None else placed_bytes + fixed_bytes


def _remade_bytes(program: Program | None, plan: Plan | None) -> int:
    """What second runs write in a step."""
    if program is None or plan is None:
        return 0
    buffers = schedule(program, plan.reruns).program.buffers
    return sum(buffer.nbytes for buffer in buffers[len(program.buffers) :])


def _bytes_per_second(timeline: Timeline | None, lane: Lane) -> float | None:
    """What a lane reached while it was busy; None where it moved nothing."""
    if timeline is None or not timeline.busy_seconds(lane):
        return None
    return timeline.lane_bytes(lane) / timeline.busy_seconds(lane)


def _graph_seconds(timeline: Timeline) -> float:
    """Time inside the model's graphs, as the prediction counts it: the loss between the passes is outside."""
    return timeline.lane_seconds(Lane.COMPUTE) + timeline.lane_seconds(Lane.STALL)


_NOT_YET = "not yet measured"


def _bytes(predicted: int | None, measured: int | None) -> tuple[str, str, str]:
    return (
        "–" if predicted is None else format_bytes(predicted),
        _NOT_YET if measured is None else format_bytes(measured),
        format_error(predicted, measured),
    )


def _seconds(predicted: float | None, measured: float | None) -> tuple[str, str, str]:
    return (
        "–" if predicted is None else format_seconds(predicted),
        _NOT_YET if measured is None else format_seconds(measured),
        format_error(predicted, measured),
    )
