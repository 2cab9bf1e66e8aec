"""Scores trained networks, of one size or several, on the subjects that none of them trained on.

As in the case study, predictions of smaller networks are resized to the largest size and scored against its truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import lmswap
from benchmarks.unet3d.brats import DataError, Subject
from benchmarks.unet3d.dataset import DataSet
from benchmarks.unet3d.predict import (
    Labels,
    Trained,
    cube_affine,
    load_trained,
    predict,
    put_back,
    scan_affine,
    write_labels,
)
from benchmarks.unet3d.preprocess import load_cube, load_labels, load_place, resample_labels
from benchmarks.unet3d.scores import Score, score_regions, write_scores

SCORES = "scores.csv"

OnPrediction = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """The scores of all models, and where their predictions are."""

    kind: str
    sizes: tuple[int, ...]
    scores: tuple[Score, ...]
    subjects: Mapping[str, Subject]
    output: Path

    @property
    def scored_size(self) -> int:
        """The size that all were scored at."""
        return max(self.sizes)

    def models(self, size: int) -> list[str]:
        """The names of the models of a size."""
        return list(dict.fromkeys(score.model for score in self.scores if score.size == size))

    def prediction(self, model: str, subject: str) -> Path:
        """The predicted labels, lying on the subject's scans."""
        return prediction_file(self.output, model, subject)


def prediction_file(output: Path, model: str, subject: str, size: int | None = None) -> Path:
    """Where a prediction is written: as the scans lie, or as a cube of ``size``."""
    return output / "predictions" / model / f"{subject}{f'-{size}' if size else ''}.nii.gz"


def load_all(folders: Sequence[Path], device: str) -> list[Trained]:
    """Loads models that can be compared.

    Raises:
        DataError: a folder has no weights, two models have one name, or not all validate on the same subjects.
    """
    models = [load_trained(folder, device) for folder in folders]
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise DataError(f"two models have one name ({', '.join(names)}); rename a folder, as results go by these names")
    for model in models[1:]:
        if set(model.validation) != set(models[0].validation) or model.data != models[0].data:
            raise DataError(
                f"{model.name} and {models[0].name} were trained with different splits, so one would be scored on what "
                "it trained on; train both with the same --split file"
            )
    return models


def evaluate(
    models: Sequence[Trained],
    data: Mapping[int, DataSet],
    output: Path,
    swapping: Mapping[str, Any] | None,
    on_prediction: OnPrediction,
) -> Evaluation:
    """Predicts every validation subject with every model, writes predictions as NIfTI and scores as CSV.

    Args:
        models: from `load_all`.
        data: by size, the validation subjects as cubes of the models' sizes.
        output: gets ``scores.csv`` and ``predictions/<model>/<subject>.nii.gz``, with ``-<size>`` also as cubes.
        swapping: arguments of `lmswap.enable`; None is plain torch.
        on_prediction: hears the model's name, and how many of how many subjects are done.

    Raises:
        LmswapError: from `lmswap.enable` and the predictions under it.
    """
    scored_size = max(model.size for model in models)
    scores: list[Score] = []
    for model in models:
        cubes, truth = data[model.size].cubes, data[scored_size].cubes
        with _enabled(model.network, swapping):
            for done, name in enumerate(sorted(model.validation)):
                on_prediction(model.name, done, len(model.validation))
                labels = _predict_file(model, cubes[name])
                _write_prediction(output, model, data[model.size].subjects[name], cubes[name], labels)
                resized = resample_labels(labels, (scored_size,) * 3)
                regions = score_regions(load_labels(truth[name]), resized)
                scores.append(Score(model.name, model.size, scored_size, name, **regions))
        on_prediction(model.name, len(model.validation), len(model.validation))
    write_scores(output / SCORES, scores)
    sizes = tuple(sorted({model.size for model in models}))
    return Evaluation(data[scored_size].kind, sizes, tuple(scores), data[scored_size].subjects, output)


@contextmanager
def _enabled(network: nn.Module, swapping: Mapping[str, Any] | None) -> Iterator[None]:
    if swapping is not None:
        lmswap.enable(network, **swapping)
    try:
        yield
    finally:
        lmswap.disable(network)


def _predict_file(model: Trained, cube: Path) -> Labels:
    images, _ = load_cube(cube, model.normalization)
    return predict(model.network, images.to(next(model.network.parameters()).device), model.dtype)


def _write_prediction(output: Path, model: Trained, subject: Subject, cube: Path, labels: Labels) -> None:
    affine, place = scan_affine(subject.truth), load_place(cube)
    write_labels(prediction_file(output, model.name, subject.name), put_back(labels, place), affine)
    as_cube = prediction_file(output, model.name, subject.name, model.size)
    write_labels(as_cube, labels, cube_affine(affine, place, model.size))
