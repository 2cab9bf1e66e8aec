"""A step as a page that answers when pointed at: memory over time, what ran on each lane, and each buffer's life."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmswap.errors import OptionError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Decision
from lmswap.ir.timeline import Span, Timeline
from lmswap.reporting.decisions import BufferDecision
from lmswap.reporting.picture import LANE_COLOURS, curve
from lmswap.reporting.text import format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_BUFFERS = 120  # drawn, the largest first: two screens
_MAX_SPANS = 4000  # of a lane; of more, neighbours are drawn as one: a page of 4,000 still scrolls at once

_DECISION_COLOURS = {Decision.KEEP: "#8a949e", Decision.SWAP: "#e69f00", Decision.RECOMPUTE: "#56b4e9"}
_MEMORY_COLOURS = {"predicted": "#56b4e9", "measured": "#0072b2"}
_ROW_PIXELS, _LANE_PIXELS, _MEMORY_PIXELS = 11, 26, 280


def write_page(
    path: Path, timelines: Sequence[Timeline], decisions: Sequence[BufferDecision], *, title: str, budget_bytes: int
) -> None:
    """Writes ``path``, an HTML file that needs no network: 5 MB, nearly all of it plotly's script.

    Raises:
        OptionError: nothing to draw yet, an ending that is not .html, a folder that does not exist, or no plotly.
    """
    if not timelines:
        raise OptionError("there is nothing to draw yet: run a training step first")
    check_can_write(path)
    from plotly.subplots import make_subplots

    shown = _largest(decisions)
    num_lanes = sum(len(timeline.lanes) for timeline in timelines)
    heights = [_MEMORY_PIXELS, _LANE_PIXELS * num_lanes, _ROW_PIXELS * max(len(shown), 1)]
    figure: Figure = make_subplots(rows=3, shared_xaxes=True, row_heights=heights, vertical_spacing=40 / sum(heights))
    _add_memory(figure, timelines, budget_bytes)
    _add_lanes(figure, timelines)
    _add_buffers(figure, shown)
    figure.update_layout(
        title=_escape(title),
        height=sum(heights) + 160,
        barmode="overlay",
        bargap=0.15,
        template="plotly_white",
        hovermode="closest",
    )
    figure.update_xaxes(ticksuffix=" s", showticklabels=True)
    figure.write_html(path, include_plotlyjs=True, config={"displaylogo": False})


def check_can_write(path: Path) -> None:
    """Raises OptionError if a page cannot be written to ``path``, as `write_page` would."""
    if path.suffix.lower() != ".html":
        raise OptionError(f"cannot write '{path}': the name must end in .html")
    if not path.parent.is_dir():
        raise OptionError(f"cannot write '{path}': folder '{path.parent}' does not exist")
    if importlib.util.find_spec("plotly") is None:
        raise OptionError("a page needs plotly, which is not installed: pip install 'lmswap[page]'")


def _largest(decisions: Sequence[BufferDecision]) -> list[BufferDecision]:
    """The buffers that are drawn, in the order in which they come to be."""
    placed = sorted((row for row in decisions if row.resident), key=lambda row: -row.nbytes)[:MAX_BUFFERS]
    return sorted(placed, key=lambda row: row.resident[0])


def _add_memory(figure: Figure, timelines: Sequence[Timeline], budget_bytes: int) -> None:
    for timeline in timelines:
        if not timeline.memory:
            continue
        seconds, nbytes = curve(timeline)
        figure.add_scatter(
            x=seconds,
            y=[count / 2**20 for count in nbytes],
            line={"shape": "hv", "color": _MEMORY_COLOURS[timeline.source], "width": 1.5},
            name=f"memory, {timeline.source}",
            hovertemplate="%{y:,.1f} MiB at %{x:.4g} s",
            row=1,
            col=1,
        )
    figure.add_hline(
        y=budget_bytes / 2**20, line_dash="dash", annotation_text=f"budget {format_bytes(budget_bytes)}", row=1, col=1
    )
    figure.update_yaxes(title_text="MiB", rangemode="tozero", row=1, col=1)


def _add_lanes(figure: Figure, timelines: Sequence[Timeline]) -> None:
    for timeline in timelines:
        for lane in timeline.lanes:
            spans = _few([span for span in timeline.spans if span.lane is lane])
            _add_bars(
                figure,
                [(f"{lane}, {timeline.source}", span.start_seconds, span.seconds, _about(span)) for span in spans],
                name=f"{lane}, {timeline.source}",
                colour=LANE_COLOURS[lane],
                row=2,
            )
    figure.update_yaxes(autorange="reversed", row=2, col=1)


def _add_buffers(figure: Figure, decisions: Sequence[BufferDecision]) -> None:
    labels = {row.buffer: f"{_escape(row.name)} · {format_bytes(row.nbytes)}" for row in decisions}
    for decision, colour in _DECISION_COLOURS.items():
        bars = [
            (labels[row.buffer], start, end - start, _life(row, start, end))
            for row in decisions
            for start, end in row.resident
            if row.decision is decision
        ]
        _add_bars(figure, bars, name=f"buffers: {decision}", colour=colour, row=3)
    order = [labels[row.buffer] for row in decisions]
    figure.update_yaxes(categoryorder="array", categoryarray=order, autorange="reversed", row=3, col=1)
    figure.update_yaxes(tickfont={"size": 9}, dtick=1, row=3, col=1)


def _add_bars(figure: Figure, bars: list[tuple[str, float, float, str]], *, name: str, colour: str, row: int) -> None:
    """Adds horizontal bars of (label, start, length, what is said of it)."""
    if not bars:
        return
    labels, starts, lengths, texts = zip(*bars, strict=True)
    figure.add_bar(
        y=labels,
        base=starts,
        x=lengths,
        orientation="h",
        marker={"color": colour, "line": {"width": 0}},
        hovertext=texts,
        hovertemplate="%{hovertext}<extra></extra>",
        textposition="none",
        name=name,
        row=row,
        col=1,
    )


def _few(spans: list[Span]) -> list[Span]:
    """``spans``, neighbours drawn as one if there are too many."""
    group = -(-len(spans) // _MAX_SPANS)
    if group <= 1:
        return spans
    joined = []
    for _, numbered in groupby(enumerate(spans), key=lambda pair: pair[0] // group):
        some = [span for _, span in numbered]
        name = f"{some[0].name} … {some[-1].name}"
        nbytes = sum(span.nbytes for span in some)
        joined.append(Span(some[0].lane, name, some[0].start_seconds, some[-1].end_seconds, nbytes))
    return joined


def _about(span: Span) -> str:
    moved = f"<br>{format_bytes(span.nbytes)}" if span.nbytes else ""
    when = f"{format_seconds(span.seconds)} from {format_seconds(span.start_seconds)}"
    return f"<b>{_escape(span.name)}</b><br>{when}{moved}"


def _life(row: BufferDecision, start: float, end: float) -> str:
    return "<br>".join(
        [
            f"<b>{_escape(row.name)}</b>, {format_bytes(row.nbytes)}: {row.decision}",
            f"on the device from {format_seconds(start)} to {format_seconds(end)} (predicted)",
            _escape(f"made by {row.made_by or 'the caller'} {row.made_at}"),
            _escape(f"last used by {row.last_used_by} {row.last_used_at}"),
            _escape(row.reason),
        ]
    )


def _escape(text: Any) -> str:
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
