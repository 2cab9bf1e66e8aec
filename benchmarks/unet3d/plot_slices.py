"""Slices of a few subjects as a picture: the scan, the drawn truth, and what a network of each size predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.unet3d.brats import MODALITIES, read_subject, require
from benchmarks.unet3d.evaluate import Evaluation
from benchmarks.unet3d.predict import scan_affine
from benchmarks.unet3d.preprocess import foreground_box
from benchmarks.unet3d.scores import REGIONS, Score

# Okabe and Ito's palette, as in the other pictures.
_LABELS = {1: ("necrotic core", "#cc79a7"), 2: ("oedema", "#009e73"), 4: ("enhancing tumour", "#e69f00")}
_INK, _NOTE = "#22272b", "#5b646c"
_MAX_SUBJECTS = 3

Slice = npt.NDArray[Any]


@dataclass(frozen=True)
class _Row:
    """One subject's slice through most of its tumour, as radiologists look at it: from the feet, the front up."""

    subject: str
    t1ce: Slice
    flair: Slice
    truth: Slice
    predictions: dict[str, Slice]


def plot_slices(evaluation: Evaluation, path: Path) -> None:
    """Draws the worst, the middle and the best subject of the largest size, on their scans as they were."""
    models = [evaluation.models(size)[0] for size in evaluation.sizes]
    rows = [_cut(evaluation, subject, models) for subject in choose_subjects(evaluation)]
    columns = 2 + len(models)
    with matplotlib.rc_context({"font.size": 9, "text.color": _INK}):
        figure = Figure(figsize=(2.5 * columns, 0.9 + 3.1 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False)
        figure.suptitle(f"Truth and prediction: {evaluation.kind}", x=0.01, ha="left", fontsize=13, fontweight="bold")
        for axes, row in zip(grid, rows, strict=True):
            _draw_row(axes, row, evaluation, models)
        handles = [Patch(facecolor=colour, label=name) for name, colour in _LABELS.values()]
        handles.append(Patch(facecolor="none", edgecolor=_INK, label="white line: border of the true whole tumour"))
        figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)
        figure.savefig(path, dpi=160)


def choose_subjects(evaluation: Evaluation) -> list[str]:
    """The worst, the middle and the best by mean Dice of the first model of the largest size; fewer if there are few.

    A region that is empty in truth and prediction is left out of a subject's mean.
    """
    model = evaluation.models(evaluation.scored_size)[0]
    ranked = sorted((score for score in evaluation.scores if score.model == model), key=_mean_dice)
    chosen = {0, len(ranked) // 2, len(ranked) - 1} if len(ranked) >= _MAX_SUBJECTS else set(range(len(ranked)))
    return [ranked[index].subject for index in sorted(chosen)]


def _mean_dice(score: Score) -> float:
    values = [score.of(region) for region in REGIONS if not math.isnan(score.of(region))]
    return sum(values) / len(values) if values else 0.0


def _cut(evaluation: Evaluation, name: str, models: list[str]) -> _Row:
    subject = evaluation.subjects[name]
    volumes, affine = read_subject(subject), scan_affine(subject.truth)
    nibabel = require("nibabel", "reading NIfTI volumes")
    box = foreground_box(volumes.images)

    def turned(volume: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The brain's box with x to the patient's left, y to the back, z to the head."""
        orientations = nibabel.orientations
        turn = orientations.ornt_transform(
            orientations.io_orientation(affine), orientations.axcodes2ornt(("L", "P", "S"))
        )
        result: npt.NDArray[Any] = orientations.apply_orientation(volume[box], turn)
        return result

    truth = turned(volumes.labels)
    height = int((truth > 0).sum(axis=(0, 1)).argmax())
    predicted = {
        model: np.asanyarray(nibabel.load(evaluation.prediction(model, name)).dataobj).astype(np.uint8)
        for model in models
    }
    t1ce, flair = (turned(volumes.images[MODALITIES.index(modality)]) for modality in ("t1ce", "flair"))
    slices = {model: turned(labels)[:, :, height].T for model, labels in predicted.items()}
    return _Row(name, t1ce[:, :, height].T, flair[:, :, height].T, truth[:, :, height].T, slices)


def _draw_row(axes: npt.NDArray[Any], row: _Row, evaluation: Evaluation, models: list[str]) -> None:
    scores = {score.model: score for score in evaluation.scores if score.subject == row.subject}
    _draw_scan(axes[0], row.t1ce, f"{row.subject}\nT1ce")
    _draw_scan(axes[1], row.flair, "FLAIR\ntruth")
    _draw_labels(axes[1], row.truth, row.truth)
    for axis, model in zip(axes[2:], models, strict=True):
        score = scores[model]
        values = " · ".join(
            f"{short} {score.of(region):.2f}" for short, region in zip(("WT", "TC", "ET"), REGIONS, strict=True)
        )
        _draw_scan(axis, row.flair, f"prediction, {score.size}³\n{values}")
        _draw_labels(axis, row.predictions[model], row.truth)


def _draw_scan(axis: Axes, image: Slice, title: str) -> None:
    axis.imshow(image, cmap="gray", vmin=0, vmax=np.percentile(image[image > 0], 99.5), interpolation="nearest")
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_axis_off()


def _draw_labels(axis: Axes, labels: Slice, truth: Slice) -> None:
    overlay = np.zeros((*labels.shape, 4))
    for label, (_, colour) in _LABELS.items():
        overlay[labels == label] = to_rgba(colour, 0.6)
    axis.imshow(overlay, interpolation="nearest")
    if (truth > 0).any():
        axis.contour(truth > 0, levels=[0.5], colors="white", linewidths=0.9)
