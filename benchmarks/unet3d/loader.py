"""The order and position of subjects in the training loop; each is read from its cube when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.unet3d.augment import SYMMETRIES, UNMOVED
from benchmarks.unet3d.preprocess import Normalization, load_cube

Draw = tuple[int, int]  # the index of a subject, and of the symmetry that it is shown in
Batch = tuple[Tensor, Tensor]  # images (1, modality, n, n, n) and truth (1, label, n, n, n)


def draw_epoch(seed: int, epoch: int, num_subjects: int) -> list[Draw]:
    """Every subject once, in the order and the positions of this epoch."""
    random = np.random.default_rng([seed, epoch])
    order, symmetries = random.permutation(num_subjects), random.integers(len(SYMMETRIES), size=num_subjects)
    return list(zip(order.tolist(), symmetries.tolist(), strict=True))


class CubeFiles(Dataset[Batch]):
    """Cubes on disk: item (subject, symmetry) is that subject's images and truth, moved together."""

    def __init__(self, paths: Sequence[Path], normalization: Normalization) -> None:
        self._paths, self._normalization = tuple(paths), normalization

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, draw: Draw) -> Batch:
        subject, symmetry = draw
        images, truth = load_cube(self._paths[subject], self._normalization)
        return SYMMETRIES[symmetry].apply(images), SYMMETRIES[symmetry].apply(truth)


class EpochSampler(Sampler[Draw]):
    """The draws of one epoch from a position on; `start` says which, before the loader is iterated."""

    def __init__(self, seed: int, num_subjects: int) -> None:
        self._seed, self._num_subjects = seed, num_subjects
        self._draws: list[Draw] = []

    def start(self, epoch: int, position: int) -> None:
        """Chooses the epoch, and how many of its subjects are done."""
        self._draws = draw_epoch(self._seed, epoch, self._num_subjects)[position:]

    def __iter__(self) -> Iterator[Draw]:
        return iter(self._draws)

    def __len__(self) -> int:
        return len(self._draws)


def training_loader(
    cubes: CubeFiles, sampler: EpochSampler, *, workers: int, pin_memory: bool = False
) -> DataLoader[Batch]:
    """One subject a batch; a worker reads the next one while the device trains.

    Workers are spawned, not forked: the engine's threads and locks must not be copied into them.
    """
    return DataLoader(
        cubes,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
        pin_memory=pin_memory,
    )


def validation_loader(cubes: CubeFiles, *, pin_memory: bool = False) -> DataLoader[Batch]:
    """Every subject as it lies, one a batch, in turn."""
    draws = [(subject, UNMOVED) for subject in range(len(cubes))]
    return DataLoader(cubes, sampler=draws, pin_memory=pin_memory)
