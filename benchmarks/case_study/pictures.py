"""The figures as SVG: the overhead curve, a comparison of links, one step at two speeds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from benchmarks.case_study.published import LARGE, SMALL, SYSTEMS
from benchmarks.case_study.ratios import Spread
from benchmarks.case_study.results import Evaluation
from benchmarks.unet3d import evaluate
from benchmarks.unet3d.plot_scores import draw_scores
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting.picture import merge_spans
from lmswap.reporting.text import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can distinguish; the same as in lmswap's own pictures.
_COLOURS = {Lane.OUT: "#e69f00", Lane.COMPUTE: "#8a949e", Lane.STALL: "#d55e00", Lane.IN: "#009e73"}
_OURS, _OTHERS, _INK, _FAINT = "#0072b2", "#cc79a7", "#22272b", "#c3c8cd"
_STYLE: dict[Any, Any] = {"font.size": 10, "text.color": _INK, "axes.labelcolor": _INK, "svg.hashsalt": "lmswap"}
_MAX_JOINED = 24  # more lines than that are a grey area


def draw_curve(points: Sequence[tuple[int, Spread]], small: int) -> str:
    """SVG of step time over that of the small size, by size: median and spread over repeats, and IBM's last points."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        axes = figure.subplots()
        factors = [(size / small) ** 3 for size, _ in points]
        percents = [100 * (spread.median - 1) for _, spread in points]
        low = [100 * (spread.median - spread.low) for _, spread in points]
        high = [100 * (spread.high - spread.median) for _, spread in points]
        axes.errorbar(factors, percents, [low, high], color=_OURS, marker="o", capsize=4, label="lmswap, measured")
        for (size, _), factor, percent in zip(points, factors, percents, strict=True):
            axes.annotate(
                f"{size}³: {percent:+.1f} %", (factor, percent), (0, -18), textcoords="offset points", ha="center"
            )
        for system, marker in zip(SYSTEMS, "sD", strict=True):
            axes.plot(
                [1, (LARGE / SMALL) ** 3], [0, 100 * (system.overhead - 1)], color=_OTHERS, marker=marker,
                linestyle=":", label=f"IBM, {system.name}: the ends of its curve, from epoch times",
            )  # fmt: skip
        axes.axhline(0, color=_FAINT, linewidth=0.8)
        axes.set_xlabel(f"voxels, as a multiple of {small}³")
        axes.set_ylabel("overhead over unlimited memory, %")
        axes.margins(x=0.08, y=0.16)
        axes.legend(frameon=False, loc="upper left")
        _clear_frame(axes)
        return _svg(figure)


def draw_links(rows: Sequence[tuple[str, str, Spread | None]]) -> str:
    """SVG bars of step time relative to unlimited memory; rows are (link, source, ratio), None where not measured."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 0.9 + 0.42 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for row, (_, whose, spread) in enumerate(rows):
            if spread is None:
                axes.annotate(" not measured", (0, row), va="center", color="#5b646c")
                continue
            colour = _OURS if whose.startswith("lmswap") else _OTHERS
            axes.barh(row, spread.median, color=colour, height=0.66)
            if spread.high > spread.low:
                axes.plot([spread.low, spread.high], [row, row], color=_INK, linewidth=1.2)
            axes.annotate(f"{spread.median:.2f} ×", (spread.high, row), (5, 0), textcoords="offset points", va="center")
        axes.axvline(1, color=_INK, linewidth=1, linestyle=(0, (5, 3)))
        axes.set_yticks(range(len(rows)), [f"{link}: {whose}" for link, whose, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)  # what was not measured has its row too
        axes.margins(x=0.12)
        axes.set_xlabel("step, as a multiple of the step with unlimited memory")
        _clear_frame(axes)
        return _svg(figure)


def draw_two_steps(steps: Sequence[tuple[str, Timeline]]) -> str:
    """SVG of the same step over two links on one time scale; lines join the copies of a tensor."""
    upper, lower = (timeline for _, timeline in steps)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.4), layout="constrained")
        axes = figure.subplots(2, sharex=True)
        axes[0].set_xlim(0, max(upper.seconds, lower.seconds))
        for row, (title, timeline) in enumerate(steps):
            # Lines from lane to lane cross only a lane that is idle in that phase: copies in come after copies out.
            order = (Lane.COMPUTE, Lane.OUT, Lane.IN) if row == 0 else (Lane.OUT, Lane.IN, Lane.COMPUTE)
            _draw_lanes(axes[row], timeline, order)
            text = f"{title}: {format_seconds(timeline.seconds)}"
            place, align = ((0, -0.55), "bottom") if row == 0 else ((0, 2.55), "top")
            axes[row].text(*place, text, va=align, fontsize=10.5, fontweight="bold")
        joined = _joined(upper, lower)
        axes[1].patch.set_visible(False)  # the lines belong to the upper axes and end in the lower ones
        for lane, above, below in joined:
            row = 1 if lane is Lane.OUT else 2
            line = ConnectionPatch(
                (_middle(above), row + 0.36), (_middle(below), row - 1.36), "data", "data",
                axesA=axes[0], axesB=axes[1], color=_COLOURS[lane], alpha=0.7, linewidth=0.8, clip_on=False,
                in_layout=False,
            )  # fmt: skip
            axes[0].add_artist(line)
        axes[1].set_xlabel("seconds from the start of the step")
        figure.supxlabel(
            f"Lines join the {len(joined)} largest trips that both plans make: orange out, green in.",
            fontsize=9, color="#5b646c", x=0.01, ha="left",
        )  # fmt: skip
        return _svg(figure)


def _draw_lanes(axes: Axes, timeline: Timeline, order: Sequence[Lane]) -> None:
    _clear_frame(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    labels = []
    for row, lane in enumerate(order):
        spans = [span for span in timeline.spans if span.lane is lane]
        axes.axhline(row, color=_FAINT, linewidth=0.5, zorder=0)
        if lane is Lane.COMPUTE:
            axes.broken_barh(merge_spans(spans), (row - 0.36, 0.72), color=_COLOURS[lane], linewidth=0)
            stalls = [span for span in timeline.spans if span.lane is Lane.STALL]
            axes.broken_barh(merge_spans(stalls), (row - 0.36, 0.72), color=_COLOURS[Lane.STALL], linewidth=0)
            labels.append(f"compute\nstalled {format_seconds(sum(span.seconds for span in stalls))}")
        else:
            bars = [(span.start_seconds, span.seconds) for span in spans]
            # An edge around every copy: how many there are can be seen.
            axes.broken_barh(
                bars, (row - 0.36, 0.72), facecolor=to_rgba(_COLOURS[lane], 0.55), edgecolor=_COLOURS[lane]
            )
            labels.append(f"swap {lane}\n{format_bytes(timeline.lane_bytes(lane))}")
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    axes.set_ylim(3.0, -0.5)


def _joined(upper: Timeline, lower: Timeline) -> list[tuple[Lane, Span, Span]]:
    """(lane, upper copy, lower copy) of the largest tensors that both timelines swap; of several copies the first."""
    pairs = []
    for lane in (Lane.OUT, Lane.IN):
        first: list[dict[int, Span]] = [{}, {}]
        for found, timeline in zip(first, (upper, lower), strict=True):
            for span in timeline.spans:
                if span.lane is lane and span.buffer is not None:
                    found.setdefault(span.buffer, span)
        pairs += [(lane, span, first[1][buffer]) for buffer, span in first[0].items() if buffer in first[1]]
    return sorted(pairs, key=lambda pair: -pair[1].nbytes)[:_MAX_JOINED]


def _middle(span: Span) -> float:
    return (span.start_seconds + span.end_seconds) / 2


def draw_dice(evaluation: Evaluation) -> str:
    """Box plots of Dice, as `python -m benchmarks.unet3d evaluate` draws them."""
    sizes = tuple(sorted({score.size for score in evaluation.scores}))
    with matplotlib.rc_context(_STYLE):
        return _svg(
            draw_scores(evaluate.Evaluation(evaluation.data, sizes, evaluation.scores, {}, Path(evaluation.folder)))
        )


def _clear_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)


def _svg(figure: Figure) -> str:
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.1)
        return file.getvalue()
