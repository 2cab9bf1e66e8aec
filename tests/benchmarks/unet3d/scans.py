"""Small subjects on disk in any of the BraTS layouts."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np

from benchmarks.unet3d.brats import Subject, find_subjects

KINDS = ("t1", "t1ce", "flair", "t2", "seg")
SHAPE = (12, 10, 8)


def random_volumes(seed: int = 0, enhancing: int = 4) -> list[np.ndarray]:
    """Four int16 images with a background of 0, and labels."""
    random = np.random.default_rng(seed)
    inside = (slice(2, 10), slice(3, 8), slice(1, 7))
    volumes = []
    for _ in range(4):
        image = np.zeros(SHAPE, np.int16)
        image[inside] = random.integers(1, 1000, image[inside].shape)
        volumes.append(image)
    labels = np.zeros(SHAPE, np.uint8)
    labels[3:9, 4:7, 2:6] = 2
    labels[4:7, 5:7, 3:5] = enhancing
    labels[5, 5, 4] = 1
    return [*volumes, labels]


def write_subject(
    folder: Path,
    case: str,
    volumes: list[np.ndarray],
    *,
    separator: str = "_",
    suffixes: tuple[str, ...] = KINDS,
    ending: str = ".nii.gz",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, volume in zip(suffixes, volumes, strict=True):
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / f"{case}{separator}{suffix}{ending}")


def make_subject(root: Path, case: str = "case_1", seed: int = 0) -> Subject:
    write_subject(root / case, case, random_volumes(seed))
    return next(subject for subject in find_subjects(root) if subject.name == case)


def make_subjects(root: Path, count: int) -> None:
    """Subjects case_0, case_1 … with different volumes."""
    for number in range(count):
        write_subject(root / f"case_{number}", f"case_{number}", random_volumes(number))
