"""Turns subjects into cubes: crop to the foreground, resample to n³, normalise over the data set; cached on disk.

The recipe of the case study: the foreground is where any modality is not 0, with a margin of one voxel; images are
resampled linearly and labels to the nearest voxel, each axis by its own factor; then each modality loses the mean over
subjects of the volumes' means and is divided by the mean of their standard deviations, background included.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.unet3d.brats import LABELS, Subject, Volumes, read_subject

FOREGROUND_TOLERANCE = 1e-5
MARGIN = 1
RECIPE = 1  # raised when the same scans would give other cubes


@dataclass(frozen=True)
class Cubes:
    """Subjects ready for the network, float32: ``images`` (S, modality, n, n, n), ``truth`` (S, label, n, n, n)."""

    images: Tensor
    truth: Tensor


def crop_to_foreground(volumes: Volumes) -> Volumes:
    """Cuts away the background around the head, all but a margin of one voxel."""
    foreground = (np.abs(volumes.images) > FOREGROUND_TOLERANCE).any(axis=0)
    box = tuple(
        slice(max(int(where.min()) - MARGIN, 0), int(where.max()) + 1 + MARGIN) for where in np.nonzero(foreground)
    )
    return Volumes(volumes.images[(slice(None), *box)], volumes.labels[box])


def resample(volumes: Volumes, size: int) -> Volumes:
    """Stretches to ``size``³, voxel centres aligned at the borders of the box; no smoothing, as the recipe has none."""
    shape = (size, size, size)
    images = torch.from_numpy(np.ascontiguousarray(volumes.images))[None]
    labels = torch.from_numpy(np.ascontiguousarray(volumes.labels))[None, None].float()
    return Volumes(
        functional.interpolate(images, shape, mode="trilinear", align_corners=False)[0].numpy(),
        functional.interpolate(labels, shape, mode="nearest-exact")[0, 0].numpy().astype(np.uint8),
    )


def prepare_cube(subject: Subject, size: int, cache: Path) -> Path:
    """Makes sure that the cube of a subject is in the cache and returns its file; the values are not normalised yet.

    The file's name follows from the scans' names, sizes and times, so changed scans give a new file.
    """
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in subject.files]
    key = hashlib.sha256(json.dumps([RECIPE, size, stamps]).encode()).hexdigest()[:16]
    path = cache / f"{subject.name}-{size}-{key}.npz"
    if not path.exists():
        volumes = resample(crop_to_foreground(read_subject(subject)), size)
        space = (1, 2, 3)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".unfinished", delete=False) as file:
            try:
                np.savez(
                    file,
                    images=volumes.images,
                    labels=volumes.labels,
                    means=volumes.images.mean(space, dtype=np.float64),
                    stds=volumes.images.std(space, dtype=np.float64),
                )
                os.replace(file.name, path)  # noqa: PTH105 - atomic: a reader sees a whole file or none
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    return path


def load_cubes(paths: Sequence[Path]) -> Cubes:
    """Loads cubes and normalises each modality over all of them."""
    images, labels, means, stds = (
        np.stack(arrays) for arrays in zip(*(_load_arrays(path) for path in paths), strict=True)
    )
    mean, std = (np.mean(values, axis=0).reshape(1, -1, 1, 1, 1).astype(np.float32) for values in (means, stds))
    images -= mean
    images /= std
    truth = np.stack([labels == label for label in LABELS], axis=1).astype(np.float32)
    return Cubes(torch.from_numpy(images), torch.from_numpy(truth))


def _load_arrays(path: Path) -> tuple[npt.NDArray[np.generic], ...]:
    with np.load(path, allow_pickle=False) as file:
        return tuple(file[name] for name in ("images", "labels", "means", "stds"))
