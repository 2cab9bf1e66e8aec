"""Dice of a prediction against the drawn truth, for the three regions that BraTS scores."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.files import writing

Labels = npt.NDArray[np.uint8]

# The regions overlap: each is a set of labels. Keys are the fields of Score.
REGIONS = {"whole_tumour": (1, 2, 4), "tumour_core": (1, 4), "enhancing_tumour": (4,)}


@dataclass(frozen=True)
class Score:
    """Dice of one prediction of ``size``³ compared at ``scored_size``³; NaN where truth and prediction are empty."""

    model: str
    size: int
    scored_size: int
    subject: str
    whole_tumour: float
    tumour_core: float
    enhancing_tumour: float

    def of(self, region: str) -> float:
        """The Dice of a key of REGIONS."""
        value: float = getattr(self, region)
        return value


def dice(truth: npt.NDArray[np.bool_], prediction: npt.NDArray[np.bool_]) -> float:
    """2·|truth ∧ prediction| / (|truth| + |prediction|); NaN if both are empty."""
    total = int(truth.sum()) + int(prediction.sum())
    return 2 * int((truth & prediction).sum()) / total if total else math.nan


def score_regions(truth: Labels, prediction: Labels) -> dict[str, float]:
    """Dice of each region of two label volumes of one shape."""
    return {region: dice(np.isin(truth, labels), np.isin(prediction, labels)) for region, labels in REGIONS.items()}


def subject_means(scores: Iterable[Score], size: int, region: str) -> dict[str, float]:
    """By subject the mean over all models of a size, as the case study pools its models; NaN is dropped."""
    values: dict[str, list[float]] = {}
    for score in scores:
        if score.size == size and not math.isnan(score.of(region)):
            values.setdefault(score.subject, []).append(score.of(region))
    return {subject: sum(some) / len(some) for subject, some in values.items()}


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """Writes a CSV with a row for each model and subject; NaN is left empty."""

    def shown(value: Any) -> Any:
        return "" if isinstance(value, float) and math.isnan(value) else value

    with writing(path), path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(field.name for field in fields(Score))
        rows.writerows(map(shown, astuple(score)) for score in scores)


def read_scores(path: Path) -> tuple[Score, ...]:
    """Reads what `write_scores` wrote.

    Raises:
        DataError: no such file, or not one of scores.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
        return tuple(
            Score(
                model=row["model"],
                size=int(row["size"]),
                scored_size=int(row["scored_size"]),
                subject=row["subject"],
                **{region: float(row[region] or math.nan) for region in REGIONS},
            )
            for row in rows
        )
    except (OSError, csv.Error, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read as scores of benchmarks.unet3d evaluate: {error!r}") from error
