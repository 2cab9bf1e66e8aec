"""Box plots of the Dice of each region, the sizes side by side, as the case study shows them."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.unet3d.evaluate import Evaluation
from benchmarks.unet3d.scores import REGIONS, subject_means

# Okabe and Ito's palette, as in the other pictures.
_COLOURS = ("#56b4e9", "#0072b2", "#009e73", "#e69f00", "#cc79a7")
_INK, _FAINT, _NOTE = "#22272b", "#c3c8cd", "#5b646c"
_GROUP_WIDTH = 0.8


def plot_scores(evaluation: Evaluation, path: Path) -> None:
    """Writes what `draw_scores` draws."""
    draw_scores(evaluation).savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.15)


def draw_scores(evaluation: Evaluation) -> Figure:
    """A box for each region and size: a value is a subject, averaged over the models of that size."""
    with matplotlib.rc_context({"font.size": 10, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(8.5, 4.8), layout="constrained")
        axes = figure.subplots()
        figure.suptitle(_title(evaluation), x=0.01, ha="left", fontsize=13, fontweight="bold")
        for index in range(len(evaluation.sizes)):
            _draw_size(axes, evaluation, index)
        axes.set_xticks(range(len(REGIONS)), [_words(region) for region in REGIONS])
        axes.set_xlim(-0.6, len(REGIONS) - 0.4)
        axes.set_ylim(-0.02, 1.02)
        axes.set_ylabel("Dice")
        axes.grid(axis="y", color=_FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        figure.text(0.01, -0.02, _footnote(evaluation), fontsize=8, color=_NOTE, va="top")
        return figure


def _draw_size(axes: Axes, evaluation: Evaluation, index: int) -> None:
    size, colour = evaluation.sizes[index], _COLOURS[index % len(_COLOURS)]
    width = _GROUP_WIDTH / len(evaluation.sizes)
    left = (index - (len(evaluation.sizes) - 1) / 2) * width
    values = [list(subject_means(evaluation.scores, size, region).values()) for region in REGIONS]
    places = [position + left for position in range(len(REGIONS))]
    boxes = axes.boxplot(
        values,
        positions=places,
        widths=0.75 * width,
        patch_artist=True,
        manage_ticks=False,
        showfliers=False,  # every subject is a dot
        medianprops={"color": _INK, "linewidth": 1.6},
        whiskerprops={"color": colour},
        capprops={"color": colour},
    )
    for box in boxes["boxes"]:
        box.set(facecolor=colour, alpha=0.35, edgecolor=colour)
    models = len(evaluation.models(size))
    boxes["boxes"][0].set_label(f"{size}³, {models} model{'s' * (models != 1)}")
    spread = np.random.default_rng(0)
    for place, some in zip(places, values, strict=True):
        axes.scatter(
            place + spread.uniform(-0.22, 0.22, len(some)) * width, some, s=10, color=colour, linewidths=0, zorder=3
        )
        if some:
            axes.scatter(place, np.mean(some), s=34, marker="D", facecolors="white", edgecolors=_INK, zorder=4)


def _title(evaluation: Evaluation) -> str:
    count = len({score.subject for score in evaluation.scores})
    return f"Dice on {count} validation subject{'s' * (count != 1)}, scored at {evaluation.scored_size}³"


def _footnote(evaluation: Evaluation) -> str:
    resized = [f"{size}³" for size in evaluation.sizes if size != evaluation.scored_size]
    note = f"Data: {evaluation.kind}. Box: quartiles, line: median, diamond: mean, dots: subjects"
    if any(len(evaluation.models(size)) > 1 for size in evaluation.sizes):
        note += ", each the mean over the models of the size"
    if resized:
        note += f".\nPredictions of {', '.join(resized)} are resized to {evaluation.scored_size}³ (nearest voxel)"
    return note + "."


def _words(region: str) -> str:
    return region.replace("_", " ")
