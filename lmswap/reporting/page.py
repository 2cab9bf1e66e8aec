"""A step as an interactive HTML page: memory over time, what ran on each lane, and the lifetime of each buffer.

The page is one file: page.html of this folder with the step inserted as JSON; a browser needs nothing else.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Decision
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting.decisions import BufferDecision
from lmswap.reporting.output_file import check_can_write
from lmswap.reporting.picture import KINDS, curve

ENDING = ".html"
MAX_BUFFERS = 120  # drawn, largest first: two screens
# Limit per lane or curve, the largest with which the page has that many bytes; beyond it neighbours are merged.
_MAX_SPANS, _MAX_BYTES = (4000, 2000, 1000, 500), 900_000
_WIDE = 1e6  # width of the whole step, in the page's coordinates
_SHORTEST_GAP = 0.002  # of the step; longer gaps are drawn as code outside the model

_TEMPLATE = Path(__file__).with_name("page.html")
# Of Okabe and Ito's palette, distinguishable by colour-blind readers; no two in one panel are alike.
_SOURCES = {"predicted": "#cc79a7", "measured": "#0072b2"}
_DECISIONS = {Decision.KEEP: "#8a949e", Decision.SWAP: "#e69f00", Decision.RECOMPUTE: "#56b4e9"}


def write_page(
    path: Path,
    timelines: Sequence[Timeline],
    decisions: Sequence[BufferDecision],
    *,
    title: str,
    budget_bytes: int,
    summary: Sequence[tuple[str, str]],
) -> None:
    """Write ``path``, an HTML file of less than 1 MB that needs no network; ``summary``: names and figures.

    Raises:
        OptionError: an ending that is not .html, or a folder that does not exist.
    """
    check_can_write(path, ENDING)
    about = {"title": title, "summary": summary, "budget": budget_bytes}
    for max_parts in _MAX_SPANS:
        # A browser may take any "<" for the end of the element that holds the data.
        step = json.dumps({**about, **_step(timelines, decisions, max_parts)}, separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        if len(step) <= _MAX_BYTES:
            break
    filled = {"title": html.escape(title), "step": step}
    template = _TEMPLATE.read_text(encoding="utf-8")
    path.write_text(re.sub("@(title|step)@", lambda found: filled[found[1]], template), encoding="utf-8")


def _step(timelines: Sequence[Timeline], decisions: Sequence[BufferDecision], max_parts: int) -> dict[str, Any]:
    """Return what is drawn, with up to ``max_parts`` parts of each lane and curve."""
    seconds = max(timeline.seconds for timeline in timelines) or 1.0
    names: dict[str, int] = {}
    shown = _largest(decisions)
    return {
        "seconds": seconds,
        "sources": {timeline.source: _SOURCES[timeline.source] for timeline in timelines},
        "decisions": {decision: colour for decision, colour in _DECISIONS.items() if _has(shown, decision)},
        "clock": shown[0].clock if shown else "",
        "memory": [_memory(timeline, seconds, max_parts) for timeline in timelines if timeline.memory],
        "lanes": _lanes(timelines, seconds, names, max_parts),
        "names": list(names),
        "buffers": [_buffer(row, seconds) for row in shown],
    }


def _largest(decisions: Sequence[BufferDecision]) -> list[BufferDecision]:
    """Return the buffers that are drawn, in order of their allocation."""
    placed = sorted((row for row in decisions if row.resident), key=lambda row: -row.nbytes)[:MAX_BUFFERS]
    return sorted(placed, key=lambda row: row.resident[0])


def _has(decisions: Iterable[BufferDecision], decision: Decision) -> bool:
    return any(row.decision is decision for row in decisions)


def _memory(timeline: Timeline, seconds: float, max_parts: int) -> dict[str, Any]:
    """Return the memory curve and its kinds, each group of neighbours as its highest point at the time of its first."""
    at, held = curve(timeline)
    group = -(-len(at) // max_parts)
    starts = range(0, len(at), group)
    highest = [max(range(start, min(start + group, len(at))), key=held.__getitem__) for start in starts]
    points = [(_as_share(at[start], seconds), int(held[high])) for start, high in zip(starts, highest, strict=True)]
    kinds = []
    for kind in timeline.bytes_by_kind:
        name, colour = KINDS[kind]
        nbytes = curve(timeline, kind)[1]
        kinds.append({"name": name, "colour": colour, "nbytes": [int(nbytes[high]) for high in highest]})
    return {"source": timeline.source, "points": points, "kinds": kinds}


def _lanes(
    timelines: Sequence[Timeline], seconds: float, names: dict[str, int], max_parts: int
) -> list[dict[str, Any]]:
    """Return a row for each lane of each timeline, predicted above measured; ``names`` of spans are numbered."""
    rows = []
    for lane in Lane:
        for timeline in timelines:
            if lane not in timeline.lanes:
                continue
            spans = [
                (
                    _as_share(span.start_seconds, seconds),
                    _as_share(span.seconds, seconds),
                    _number(span, names),
                    span.nbytes,
                )
                for span in _merged([span for span in timeline.spans if span.lane is lane], max_parts)
            ]
            if lane is Lane.COMPUTE:
                spans += [
                    (_as_share(start, seconds), _as_share(end - start, seconds), -1, 0)
                    for start, end in _gaps(timeline)
                ]
            rows.append({"label": f"{lane}, {timeline.source}", "source": timeline.source, "spans": spans})
    return rows


def _number(span: Span, names: dict[str, int]) -> int:
    return names.setdefault(span.name, len(names))


def _gaps(timeline: Timeline) -> list[tuple[float, float]]:
    """Return when the model's graphs neither ran nor waited, between the first and the last of them."""
    inside = sorted(
        (span.start_seconds, span.end_seconds)
        for span in timeline.spans
        if span.lane in (Lane.COMPUTE, Lane.STALL, Lane.HOST)
    )
    gaps, until = [], inside[0][1] if inside else 0.0
    shortest = _SHORTEST_GAP * timeline.seconds
    for start, end in inside:
        if start - until > shortest:
            gaps.append((until, start))
        until = max(until, end)
    return gaps


def _merged(spans: list[Span], max_parts: int) -> list[Span]:
    """Return ``spans``, with neighbours merged if there are more than ``max_parts``."""
    group = -(-len(spans) // max_parts)
    if group <= 1:
        return spans
    joined = []
    for _, numbered in groupby(enumerate(spans), key=lambda pair: pair[0] // group):
        some = [span for _, span in numbered]
        name = f"{some[0].name} … {some[-1].name}"
        nbytes = sum(span.nbytes for span in some)
        joined.append(Span(some[0].lane, name, some[0].start_seconds, some[-1].end_seconds, nbytes))
    return joined


def _buffer(row: BufferDecision, seconds: float) -> dict[str, Any]:
    """Return one buffer's row: its bars, and the text shown for them."""
    return {
        "label": f"{row.name} · {format_bytes(row.nbytes)}",
        "decision": row.decision,
        "bars": [(_as_share(start, seconds), _as_share(end - start, seconds)) for start, end in row.resident],
        "about": [
            row.reason,
            f"made by {row.made_by or 'the caller'} {row.made_at}".rstrip(),
            f"last used by {row.last_used_by} {row.last_used_at}".rstrip(),
        ],
    }


def _as_share(at_seconds: float, seconds: float) -> int:
    return round(_WIDE * at_seconds / seconds)
