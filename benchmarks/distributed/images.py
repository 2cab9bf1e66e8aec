"""The images that ResNet-50 trains on: a folder as of ImageNet, or without one the digits of scikit-learn.

``ROOT/train/CLASS/*`` and ``ROOT/val/CLASS/*``: a folder for each class, the same classes in both.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.unet3d.brats import DataError, require

Draw = tuple[int, int]  # the index of an image, and the seed of its crop
UNMOVED = -1  # no crop is drawn: the middle

DIGITS_SIDE = 32  # scikit-learn has them at 8 x 8, which ResNet-50 would halve to nothing
_VALIDATION_SHARE = 8  # each eighth digit
_SUFFIXES = {".jpg", ".jpeg", ".png"}
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as its models take it
_AREA, _RATIO = (0.25, 1.0), (3 / 4, 4 / 3)  # of a crop in training
_MIDDLE = 0.875  # of the shorter side, in validation


@dataclass(frozen=True)
class ImageFolder:
    """The images of ``train`` or ``val`` in the order of their names; ``labels`` are indices of ``classes``."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


def find_images(root: Path, part: str) -> ImageFolder:
    """Looks for the images of one part.

    Raises:
        DataError: there is no such folder, or nothing in it.
    """
    folder = root / part
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; --data takes one that has train/CLASS/*.jpg and val/CLASS/*.jpg")
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    if not found:
        raise DataError(f"{folder} has no class folders with images ({', '.join(sorted(_SUFFIXES))})")
    paths, labels = zip(*found, strict=True)
    return ImageFolder(paths, labels, classes)


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images on disk: item (index, seed) is (3, size, size), normalised, and its label."""

    def __init__(self, folder: ImageFolder, size: int) -> None:
        self._folder, self._size = folder, size

    def __len__(self) -> int:
        return len(self._folder.paths)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        index, seed = draw
        image = require("PIL.Image", "reading images").open(self._folder.paths[index]).convert("RGB")
        box, is_mirrored = middle(image.size) if seed == UNMOVED else draw_crop(image.size, seed)
        pixels = np.asarray(image.resize((self._size, self._size), box=box, resample=2), np.float32) / 255  # bilinear
        normalised = (pixels[:, ::-1] if is_mirrored else pixels) - np.array(_MEAN, np.float32)
        normalised = normalised / np.array(_DEVIATION, np.float32)
        return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1))), self._folder.labels[index]


Crop = tuple[tuple[float, float, float, float], bool]  # left, top, right, bottom; whether it is mirrored


def draw_crop(size: tuple[int, int], seed: int) -> Crop:
    """A random part of an image of (width, height) and whether it is mirrored; a part that would not fit is cut off."""
    random = np.random.default_rng(seed)
    area, ratio = random.uniform(*_AREA), np.exp(random.uniform(*np.log(_RATIO)))
    width = min(size[0], np.sqrt(size[0] * size[1] * area * ratio))
    height = min(size[1], np.sqrt(size[0] * size[1] * area / ratio))
    left, top = random.uniform(0, size[0] - width), random.uniform(0, size[1] - height)
    return (left, top, left + width, top + height), bool(random.integers(2))


def middle(size: tuple[int, int]) -> Crop:
    """The centre square of an image of (width, height), not mirrored."""
    side = _MIDDLE * min(size)
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return (left, top, left + side, top + side), False


def make_digits(root: Path) -> None:
    """Makes sure that ``root`` holds the 1,797 handwritten digits that scikit-learn carries, as an image folder."""
    if root.exists():
        return
    digits = require("sklearn.datasets", "making images of its digits").load_digits()
    image_module = require("PIL.Image", "writing images")
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=root.parent))
    try:
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            part = "val" if number % _VALIDATION_SHARE == 0 else "train"
            folder = unfinished / part / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            image = image_module.fromarray((pixels * 15.9).astype(np.uint8))  # of 0 to 16
            image.resize((DIGITS_SIDE, DIGITS_SIDE), resample=2).save(folder / f"{number:04d}.png")
        unfinished.chmod(0o755)
        unfinished.rename(root)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
