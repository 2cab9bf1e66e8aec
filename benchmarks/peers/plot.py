"""Step time over peak memory, a panel for each model: lower and further left is better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from benchmarks.peers.cell import REFERENCE, Outcome
from benchmarks.peers.results import Results
from benchmarks.peers.ways import PEERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can distinguish; lmswap's policies are solid, the others hollow.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999", "#22272b")
_MARKERS = "os^Dvphd"
_COLUMNS = 3


def plot(results: Sequence[Results], path: Path) -> None:
    """Draws what ran, by model and relative to its reference; what did not fit or broke has no point."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and only needed at the end

    outcomes = [outcome for of_model in results for outcome in of_model.outcomes]
    ways = [way for way in dict.fromkeys(outcome.cell.way for outcome in outcomes) if way != REFERENCE]
    rows = -(-(len(results) + 1) // _COLUMNS)
    figure = Figure(figsize=(4.2 * _COLUMNS, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for axes, of_model in zip(panels, results, strict=False):
        _draw_model(axes, of_model.outcomes, ways)
        axes.set_title(of_model.outcomes[0].cell.model, loc="left")
    for axes in panels[len(results) :]:
        axes.axis("off")
    figure.supxlabel("peak memory, % of the unconstrained step")
    figure.supylabel("step time, × the unconstrained step")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[len(results)].legend(handles, labels, loc="center", frameon=False)
    titles = dict.fromkeys(line for of_model in results for line in _describe(of_model.origin))
    figure.suptitle("\n".join(titles), fontsize=9)
    figure.savefig(path, dpi=140)


def _describe(origin: dict[str, Any]) -> list[str]:
    machine = f"{origin['device']}, torch {origin['torch']}, {origin['threads']} threads"
    return [machine, *wrap(origin["note"], 160)]


def _draw_model(axes: Axes, outcomes: Sequence[Outcome], ways: list[str]) -> None:
    reference = next(outcome for outcome in outcomes if outcome.cell.way == REFERENCE)
    for number, way in enumerate(ways):
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        points = sorted(
            (100 * o.peak_bytes / reference.peak_bytes, o.overhead)
            for o in outcomes
            if o.cell.way == way and o.peak_bytes and o.overhead and reference.peak_bytes
        )
        axes.plot(
            [peak for peak, _ in points],
            [overhead for _, overhead in points],
            marker=marker,
            color=color,
            markerfacecolor="none" if way in PEERS else color,
            linestyle=":" if way in PEERS else "-",
            linewidth=1,
            label=way,
        )
    axes.plot(100, 1, "*", color="black", markersize=11, label="unconstrained")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.grid(visible=True, which="both", linewidth=0.3)
