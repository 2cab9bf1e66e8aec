"""Memory over time with the lanes below it, as a picture: where the peak is, and which compute hides the copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting.output_file import check_can_write
from lmswap.reporting.text import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg", ".pdf")
_LABEL_SHARE = 0.09  # height of a label, as a share of the memory panel

# Okabe and Ito's palette: distinguishable by colour-blind readers, and in print.
LANE_COLOURS = {
    Lane.COMPUTE: "#8a949e",
    Lane.STALL: "#d55e00",
    Lane.OUT: "#e69f00",
    Lane.IN: "#009e73",
    Lane.HOST: "#f0e442",
    Lane.NETWORK: "#cc79a7",
}
_MEMORY, _INK, _FAINT = "#0072b2", "#22272b", "#c3c8cd"
# Names and colours of the parts of a whole step's memory, from below; the last is all but the others.
KINDS = {
    BufferKind.WEIGHT: ("parameters", "#009e73"),
    BufferKind.SUMMED_GRADIENT: ("gradients", "#d55e00"),
    BufferKind.OPTIMIZER_STATE: ("optimizer state", "#f0e442"),
    BufferKind.ACTIVATION: ("activations", _MEMORY),
}


def write_picture(
    path: Path,
    timelines: Sequence[Timeline],
    *,
    title: str,
    budget_bytes: int,
    peak_bytes: Mapping[str, int | None],
) -> None:
    """Draw ``timelines`` one below the other on one scale of time and bytes.

    ``peak_bytes`` holds the peak by the timeline's source; a measured one can be above every point of its curve, which
    is sampled.

    Raises:
        OptionError: an ending that is not .png, .svg or .pdf, or a folder that does not exist.
    """
    check_can_write(path, *ENDINGS)
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: a report must not touch the user's own figures

    with matplotlib.rc_context({"font.size": 10, "text.color": _INK, "axes.labelcolor": _INK, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 0.7 + 3.7 * len(timelines)), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes = figure.subplots(2 * len(timelines), sharex=True, height_ratios=[2.6, 1] * len(timelines), squeeze=False)
        peaks = [peak_bytes.get(timeline.source) or timeline.peak_bytes for timeline in timelines]
        # A budget of which the step takes little would flatten the curves.
        top = 1.22 * max(budget_bytes if budget_bytes <= 2 * max(peaks) else 0, *peaks)
        for timeline, peak, memory, lanes in zip(timelines, peaks, axes[::2, 0], axes[1::2, 0], strict=True):
            _draw_memory(memory, timeline, budget_bytes, peak, top)
            _draw_lanes(lanes, timeline)
        axes[-1, 0].set_xlabel("seconds from the start of the step")
        axes[0, 0].set_xlim(0, max(timeline.seconds for timeline in timelines) or 1.0)
        figure.savefig(path, dpi=150)


def _draw_memory(axes: Axes, timeline: Timeline, budget_bytes: int, peak_bytes: int, top: float) -> None:
    unit, scale = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20) if top >= 2**20 else ("KiB", 2**10)
    _clear_frame(axes)
    axes.set_ylim(0, top / scale)
    axes.set_ylabel(f"memory, {unit}")
    axes.grid(axis="y", color=_FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_title(f"{timeline.source}: {format_seconds(timeline.seconds)}", loc="left", fontsize=10, fontweight="bold")
    label_height = min(budget_bytes, (1 - _LABEL_SHARE) * top) / scale
    label = f"budget {format_bytes(budget_bytes)}" + ", further up" * (budget_bytes > top)
    _draw_level(axes, label, budget_bytes / scale, _INK, align="right", label_height=label_height)
    if peak_bytes:
        # The budget's line would cross a label between the two, and the curve one below both.
        is_close = peak_bytes <= budget_bytes < peak_bytes + _LABEL_SHARE * top
        label, above = f"peak {format_bytes(peak_bytes)}", budget_bytes if is_close else peak_bytes
        _draw_level(axes, label, peak_bytes / scale, _MEMORY, align="left", label_height=above / scale)
    if not timeline.memory:
        axes.text(0.5, 0.4, "memory over time was not recorded", transform=axes.transAxes, ha="center", color="gray")
        return
    seconds, resident = curve(timeline)
    resident = [nbytes / scale for nbytes in resident]
    if timeline.bytes_by_kind:
        _stack_kinds(axes, timeline, scale)
    else:
        axes.fill_between(seconds, resident, step="post", color=_MEMORY, alpha=0.28, linewidth=0)
    axes.step(seconds, resident, where="post", color=_MEMORY, linewidth=1.2)
    highest = max(timeline.memory, key=lambda point: point[1])
    axes.plot([highest[0]], [highest[1] / scale], "o", color=_MEMORY, markersize=5, clip_on=False)


def _stack_kinds(axes: Axes, timeline: Timeline, scale: int) -> None:
    """Fill the area below the curve by kind of buffers, with a legend."""
    seconds, _ = curve(timeline)
    below = [0.0] * len(seconds)
    for kind in timeline.bytes_by_kind:
        name, colour = KINDS[kind]
        above = [low + nbytes / scale for low, nbytes in zip(below, curve(timeline, kind)[1], strict=True)]
        axes.fill_between(seconds, below, above, step="post", color=colour, alpha=0.45, linewidth=0, label=name)
        below = above
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(labels), fontsize=9, frameon=False)


def _draw_level(
    axes: Axes,
    label: str,
    height: float,
    colour: str,
    *,
    align: Literal["left", "right"],
    label_height: float | None = None,
) -> None:
    """Draw a line at ``height``, with its label above it or a higher line."""
    axes.axhline(height, color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
    is_left = align == "left"
    axes.annotate(
        label,
        (0 if is_left else 1, height if label_height is None else label_height),
        xycoords=("axes fraction", "data"),
        xytext=(4 if is_left else -4, 3),
        textcoords="offset points",
        ha=align,
        va="bottom",
        color=colour,
        fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},  # above the memory curve
        zorder=4,
    )


def curve(timeline: Timeline, kind: BufferKind | None = None) -> tuple[list[float], list[float]]:
    """Return the points of the memory curve, or ``kind``'s, up to the step's end; of several at one time, the last."""
    held = timeline.bytes_by_kind[kind] if kind else [nbytes for _, nbytes in timeline.memory]
    points = [(seconds, nbytes) for (seconds, _), nbytes in zip(timeline.memory, held, strict=True)]
    points.append((max(timeline.seconds, points[-1][0]), points[-1][1]))
    lasting = [point for point, after in pairwise(points) if after[0] > point[0]] + points[-1:]
    return [seconds for seconds, _ in lasting], [float(nbytes) for _, nbytes in lasting]


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    _clear_frame(axes)
    axes.spines["left"].set_visible(False)
    labels = []
    for row, lane in enumerate(timeline.lanes):
        spans = [span for span in timeline.spans if span.lane is lane]
        axes.axhline(row, color=_FAINT, linewidth=0.5, zorder=0)
        # The outline keeps copies of milliseconds visible in steps of seconds.
        axes.broken_barh(merge_spans(spans), (row - 0.36, 0.72), color=LANE_COLOURS[lane], linewidth=0.8)
        labels.append(_lane_label(lane, timeline))
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _lane_label(lane: Lane, timeline: Timeline) -> str:
    moved = timeline.lane_bytes(lane)
    return f"{lane}  {format_bytes(moved)}" if moved else f"{lane}  {format_seconds(timeline.lane_seconds(lane))}"


def merge_spans(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return (start, length) of the spans, touching ones merged: thousands of ops become a few bars without seams."""
    merged: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.start_seconds):
        if merged and span.start_seconds <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span.end_seconds)
        else:
            merged.append([span.start_seconds, span.end_seconds])
    return [(start, end - start) for start, end in merged]


def _clear_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
