"""Bounding boxes of the brains in the data: the case study's Table 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.case_study.results import Boxes
from benchmarks.unet3d.brats import Subject, read_subject
from benchmarks.unet3d.preprocess import FOREGROUND_TOLERANCE


def measure_boxes(subjects: Sequence[Subject]) -> Boxes:
    """The box around what any modality shows, of each subject; without the margin that training adds.

    Raises:
        DataError: a subject cannot be read.
    """
    return Boxes(tuple(_sides(subject) for subject in subjects))


def _sides(subject: Subject) -> tuple[int, int, int]:
    foreground = (np.abs(read_subject(subject).images) > FOREGROUND_TOLERANCE).any(axis=0)
    x, y, z = (int(np.ptp(where)) + 1 for where in np.nonzero(foreground))
    return x, y, z
