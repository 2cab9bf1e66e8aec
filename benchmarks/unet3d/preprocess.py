"""Turns subjects into cubes: crop to the foreground, resample to n³, normalise over the data set; cached on disk.

The recipe of the case study: the foreground is where any modality is not 0, with a margin of one voxel; images are
resampled linearly and labels to the nearest voxel, each axis by its own factor; then each modality loses the mean over
subjects of the volumes' means and is divided by the mean of their standard deviations, background included.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.unet3d.brats import (
    FOREGROUND_TOLERANCE,
    LABELS,
    MODALITIES,
    DataError,
    Subject,
    Volumes,
    read_subject,
)
from benchmarks.unet3d.files import replacing, writing

MARGIN = 1
RECIPE = 2  # raised when the same scans would give other cubes

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Cubes:
    """Subjects ready for the network, float32: ``images`` (S, modality, n, n, n), ``truth`` (S, label, n, n, n)."""

    images: Tensor
    truth: Tensor


@dataclass(frozen=True)
class Normalization:
    """What each modality loses and is then divided by: two float32 arrays (modality,)."""

    means: npt.NDArray[np.float32]
    stds: npt.NDArray[np.float32]

    def apply(self, images: npt.NDArray[np.float32]) -> None:
        """Normalises (modality, n, n, n) in place."""
        images -= self.means[:, None, None, None]
        images /= self.stds[:, None, None, None]


@dataclass(frozen=True)
class Place:
    """Where a cube was cut from: the ``box`` of its voxels in a volume of ``shape``."""

    box: Box
    shape: tuple[int, ...]


def foreground_box(images: npt.NDArray[np.float32]) -> Box:
    """Where any of (modality, X, Y, Z) is not 0, with a margin of one voxel."""
    foreground = (np.abs(images) > FOREGROUND_TOLERANCE).any(axis=0)
    return tuple(
        slice(max(int(where.min()) - MARGIN, 0), min(int(where.max()) + 1 + MARGIN, side))
        for where, side in zip(np.nonzero(foreground), foreground.shape, strict=True)
    )


def crop(volumes: Volumes, box: Box) -> Volumes:
    """Cuts a box out."""
    return Volumes(volumes.images[(slice(None), *box)], volumes.labels[box])


def resample(volumes: Volumes, size: int) -> Volumes:
    """Stretches to ``size``³, voxel centres aligned at the borders of the box; no smoothing, as the recipe has none."""
    shape = (size, size, size)
    images = torch.from_numpy(np.ascontiguousarray(volumes.images))[None]
    return Volumes(
        functional.interpolate(images, shape, mode="trilinear", align_corners=False)[0].numpy(),
        resample_labels(volumes.labels, shape),
    )


def resample_labels(labels: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Stretches labels (X, Y, Z) to ``shape``, each voxel taking the nearest; predictions are resized so too."""
    volume = torch.from_numpy(np.ascontiguousarray(labels))[None, None].float()
    return functional.interpolate(volume, shape, mode="nearest-exact")[0, 0].numpy().astype(np.uint8)


def prepare_cube(subject: Subject, size: int, cache: Path) -> Path:
    """Makes sure that the cube of a subject is in the cache and returns its file; the values are not normalised yet.

    The file's name follows from the scans' names, sizes and times, so changed scans give a new file.

    Raises:
        DataError: the scans are damaged, or the file cannot be written.
    """
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in subject.files]
    key = hashlib.sha256(json.dumps([RECIPE, size, stamps]).encode()).hexdigest()[:16]
    path = cache / f"{subject.name}-{size}-{key}.npz"
    with writing(path):  # its name may be longer than the system allows
        is_there = path.exists()
    if not is_there:
        whole = read_subject(subject)
        box = foreground_box(whole.images)
        volumes = resample(crop(whole, box), size)
        space = (1, 2, 3)
        _write_cube(
            path,
            images=volumes.images,
            labels=volumes.labels,
            means=volumes.images.mean(space, dtype=np.float64),
            stds=volumes.images.std(space, dtype=np.float64),
            box=np.array([(side.start, side.stop) for side in box]),
            shape=np.array(whole.labels.shape),
        )
    return path


def _write_cube(path: Path, **arrays: Any) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")  # several processes may share a cache
    with writing(path), replacing(path, unfinished) as file:
        np.savez(file, **arrays)


def measure_normalization(paths: Sequence[Path]) -> Normalization:
    """The means over cubes of the volumes' means and of their standard deviations; reads no image.

    Raises:
        DataError: a modality has one value throughout in every subject, so nothing can be normalised by it.
    """
    means, stds = (np.stack(values) for values in zip(*(_load(path, "means", "stds") for path in paths), strict=True))
    for modality, spread in zip(MODALITIES, stds.max(axis=0), strict=True):
        if spread == 0:
            raise DataError(
                f"{modality} has one value throughout in all {len(paths)} subjects: these are no scans of it"
            )
    return Normalization(means.mean(axis=0).astype(np.float32), stds.mean(axis=0).astype(np.float32))


def load_cube(path: Path, normalization: Normalization) -> tuple[Tensor, Tensor]:
    """Loads one cube for the network: images (modality, n, n, n), normalised, and truth (label, n, n, n), float32."""
    images, labels = _load(path, "images", "labels")
    normalization.apply(images)
    truth = np.stack([labels == label for label in LABELS]).astype(np.float32)
    return torch.from_numpy(images), torch.from_numpy(truth)


def load_cubes(paths: Sequence[Path]) -> Cubes:
    """Loads cubes and normalises each modality over all of them."""
    normalization = measure_normalization(paths)
    images, truth = zip(*(load_cube(path, normalization) for path in paths), strict=True)
    return Cubes(torch.stack(images), torch.stack(truth))


def load_labels(path: Path) -> npt.NDArray[np.uint8]:
    """The drawn labels of a cube, uint8 (n, n, n)."""
    (labels,) = _load(path, "labels")
    return labels


def load_place(path: Path) -> Place:
    """Where a cube was cut from."""
    box, shape = _load(path, "box", "shape")
    return Place(tuple(slice(*side) for side in box.tolist()), tuple(shape.tolist()))


def _load(path: Path, *names: str) -> tuple[npt.NDArray[Any], ...]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return tuple(arrays[name] for name in names)
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read as a prepared cube ({error}); it is prepared again if removed"
        ) from error
