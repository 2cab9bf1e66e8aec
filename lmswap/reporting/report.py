"""The report of a model's training step: bytes, peak, seconds and stalls, predicted and measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group

from lmswap.errors import OptionError
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Timeline
from lmswap.reporting.chrome import write_chrome_trace
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.metrics import PREFIX, metrics_of
from lmswap.reporting.page import write_page
from lmswap.reporting.picture import write_picture
from lmswap.reporting.step import StepFigures
from lmswap.reporting.summary import figures_of, summarize
from lmswap.reporting.text import Printable

SCHEMA = "lmswap.report/3"


@dataclass(frozen=True, repr=False)
class Report(Printable, StepFigures):
    """A step's figures, as text, in a notebook, and as JSON, picture, page or trace."""

    def __rich__(self) -> Group:
        """Return the report's parts, for `rich.print`."""
        return summarize(self)

    def __repr__(self) -> str:
        return f"<report of {self.model} after {self.steps} steps; print it, or see its fields>"

    def to_json(self) -> str:
        """Return every field as JSON, schema "lmswap.report/3"; sizes in bytes, times in seconds."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def metrics(self, prefix: str = PREFIX) -> dict[str, int | float]:
        """Return the figures known so far as numbers for an experiment tracker, "lmswap/peak_bytes" and so on.

        Examples:
            >>> accelerator.log(lmswap.report(model).metrics(), step=step)
        """
        return metrics_of(self, prefix)

    def plot(self, path: str | Path) -> None:
        """Draw memory over time and what ran on each lane, predicted above measured, as .png, .svg or .pdf.

        Raises:
            OptionError: no step has run yet, an unknown ending, or a folder that does not exist.
        """
        title = f"{self.model} on {self.device}: policy {self.policy}, tier {self.tier}"
        peaks = {"predicted": self.predicted_peak_bytes, "measured": self.measured_peak_bytes}
        write_picture(Path(path), self._timelines(), title=title, budget_bytes=self.budget_bytes, peak_bytes=peaks)

    def to_html(self, path: str | Path) -> None:
        """Write an interactive page of the step: memory, lanes, and the lifetime of each large buffer.

        It is one file, and needs no network.

        Raises:
            OptionError: no step has run yet, an ending that is not .html, or a folder that does not exist.
        """
        write_page(
            Path(path),
            self._timelines(),
            self.decisions,
            title=f"{self.model} on {self.device}: policy {self.policy}, tier {self.tier}",
            budget_bytes=self.budget_bytes,
            summary=figures_of(self),
        )

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write both timelines in the trace event format, which Perfetto and chrome://tracing open.

        Raises:
            OptionError: no step has run yet, or a folder that does not exist.
        """
        write_chrome_trace(
            Path(path), self._timelines(), about={"model": self.model, "budget_bytes": self.budget_bytes}
        )

    def _timelines(self) -> tuple[Timeline, ...]:
        found = tuple(timeline for timeline in (self.predicted, self.measured) if timeline is not None)
        if not found:
            raise OptionError("there is no timeline of a step yet: run a training step first")
        return found


def make_report(
    known: StepFigures,
    *,
    program: Program | None = None,
    plan: Plan | None = None,
    placed_bytes: int | None = None,
    unplanned_step_bytes: int | None = None,
    update_peak_bytes: int = 0,
) -> Report:
    """Complete the figures of one model's step by those that follow from its plan and its timelines.

    Args:
        known: all other figures; the memory of ``predicted`` counts what the step itself allocates, that of
            ``measured`` counts like the budget, and is empty where it was not recorded.
        program: the step as planned, None before the first plan.
        plan: its plan.
        placed_bytes: what its tensors take if they have planned offsets on the device, else None.
        unplanned_step_bytes: what they would take without a plan.
        update_peak_bytes: of the update that follows the step, like the budget; 0 if it takes less than the step.
    """
    predicted, measured = known.predicted, known.measured
    fixed_bytes = known.base_bytes + known.reserve_bytes
    if predicted is not None:
        raised = tuple((seconds, nbytes + fixed_bytes) for seconds, nbytes in predicted.memory)
        predicted = Timeline(predicted.source, predicted.spans, raised)
    figures: dict[str, Any] = {
        "predicted": predicted,
        "predicted_peak_bytes": _predicted_peak(predicted, placed_bytes, fixed_bytes, update_peak_bytes),
    }
    if unplanned_step_bytes is not None:
        figures["unplanned_peak_bytes"] = unplanned_step_bytes + fixed_bytes
    if plan is not None:
        figures |= {
            "predicted_seconds": plan.predicted_seconds,
            "bound_seconds": plan.certificate.seconds if plan.certificate is not None else None,
            "tier_planned_bytes": plan.tier_bytes.get(known.tier, 0) + known.state_bytes,
        }
    if program is not None and plan is not None:
        figures["decisions"] = buffer_decisions(program, plan, predicted, measured)
    if measured is not None:
        figures |= {
            "measured_seconds": _graph_seconds(measured),
            "swapped_out_bytes": measured.lane_bytes(Lane.OUT),
            "swapped_in_bytes": measured.lane_bytes(Lane.IN),
            "state_out_bytes": measured.lane_bytes(Lane.OUT, is_state=True),
            "state_in_bytes": measured.lane_bytes(Lane.IN, is_state=True),
            "out_bytes_per_second": _bytes_per_second(measured, Lane.OUT),
            "in_bytes_per_second": _bytes_per_second(measured, Lane.IN),
            "recomputed_bytes": _recomputed_bytes(program, plan),
            "stall_seconds": measured.lane_seconds(Lane.STALL),
        }
    return Report(**vars(known) | figures)


def _predicted_peak(
    predicted: Timeline | None, placed_bytes: int | None, fixed_bytes: int, update_peak_bytes: int
) -> int | None:
    """Return the peak: in an arena, all of it, whatever tensors hold; else that of the raised timeline, or update."""
    if predicted is None:
        return None
    return max(predicted.peak_bytes, update_peak_bytes) if placed_bytes is None else placed_bytes + fixed_bytes


def _recomputed_bytes(program: Program | None, plan: Plan | None) -> int:
    """Return the bytes written by recomputation in a step."""
    if program is None or plan is None:
        return 0
    buffers = schedule(program, plan.recomputes).program.buffers
    return sum(buffer.nbytes for buffer in buffers[len(program.buffers) :])


def _bytes_per_second(timeline: Timeline, lane: Lane) -> float | None:
    """Return a lane's rate while it was busy; None where it moved nothing."""
    if not timeline.busy_seconds(lane):
        return None
    nbytes = timeline.lane_bytes(lane) + timeline.lane_bytes(lane, is_state=True)
    return nbytes / timeline.busy_seconds(lane)


def _graph_seconds(timeline: Timeline) -> float:
    """Return the time inside the model's graphs, as predicted: the loss between the passes is outside."""
    return timeline.lane_seconds(Lane.COMPUTE) + timeline.lane_seconds(Lane.STALL)
