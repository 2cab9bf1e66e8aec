"""Finds and reads subjects in the folder layouts of BraTS 2017, 2020, 2021 and 2023.

A subject is a folder of five volumes, ``<case>_<kind>.nii.gz``. The releases differ in the separator (``_`` or ``-``),
the names of the kinds, compression, nesting (HGG/LGG), and the number of the enhancing tumour (4; since 2023: 3).
"""

from __future__ import annotations

import importlib
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODALITIES = ("t1", "t1ce", "flair", "t2")
LABELS = (1, 2, 4)  # necrotic core, oedema, enhancing tumour
TRUTH = "seg"

_KIND_OF_SUFFIX = {
    "t1": "t1", "t1n": "t1",
    "t1ce": "t1ce", "t1gd": "t1ce", "t1c": "t1ce",
    "flair": "flair", "t2f": "flair",
    "t2": "t2", "t2w": "t2",
    "seg": TRUTH, "truth": TRUTH, "glistrboost_manuallycorrected": TRUTH,
}  # fmt: skip
_FILE_NAME = re.compile(
    rf"(?P<case>[^.].*?)[_-](?P<suffix>{'|'.join(sorted(_KIND_OF_SUFFIX, key=len, reverse=True))})\.nii(?:\.gz)?",
    re.IGNORECASE,
)


class DataError(Exception):
    """Scans that cannot be used, or a package that reading them needs; the message names the file and what to do."""


@dataclass(frozen=True)
class Subject:
    """The files of one subject: ``images`` in the order of MODALITIES, and the drawn truth."""

    name: str
    images: tuple[Path, ...]
    truth: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """All five files, the truth last."""
        return (*self.images, self.truth)


@dataclass(frozen=True)
class Volumes:
    """A subject in memory: ``images`` float32 (modality, X, Y, Z), ``labels`` uint8 (X, Y, Z) of 0 and LABELS."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.uint8]


def find_subjects(root: Path) -> list[Subject]:
    """Lists the subjects anywhere under ``root``, by name.

    Raises:
        DataError: no subjects there, or a subject with a missing or a doubled file.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give the folder that holds the BraTS subjects")
    found: dict[tuple[Path, str], dict[str, Path]] = {}
    for path in sorted(root.rglob("*.nii*")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        files = found.setdefault((path.parent, match["case"]), {})
        kind = _KIND_OF_SUFFIX[match["suffix"].lower()]
        if kind in files:
            raise DataError(f"{path.parent} has two files for '{kind}': {files[kind].name} and {path.name}; keep one")
        files[kind] = path
    if not found:
        raise DataError(
            f"{root} has no BraTS subjects: no file below it is named like <case>_t1.nii.gz or <case>-t1n.nii.gz"
        )
    return [_subject(folder, case, files) for (folder, case), files in sorted(found.items())]


def _subject(folder: Path, case: str, files: dict[str, Path]) -> Subject:
    missing = [kind for kind in (*MODALITIES, TRUTH) if kind not in files]
    if missing:
        others = sorted({path.name for path in folder.iterdir()} - {path.name for path in files.values()})
        raise DataError(
            f"subject {case} in {folder} has no file for {', '.join(missing)}"
            + (f"; other files there: {', '.join(others)}" if others else "")
            + "; complete the subject or take it out of the folder"
        )
    return Subject(case, tuple(files[kind] for kind in MODALITIES), files[TRUTH])


def read_subject(subject: Subject) -> Volumes:
    """Reads all five volumes; the enhancing tumour is 4 whatever the release calls it.

    Raises:
        DataError: a file is damaged, not 3-D, of another shape than the first, holds values that are not finite, or
            the truth holds unknown labels or none at all.
    """
    volumes = [_read_volume(path) for path in subject.files]
    shape = volumes[0].shape
    for path, volume in zip(subject.files, volumes, strict=True):
        if volume.ndim != 3 or volume.shape != shape:
            raise DataError(
                f"{path} has shape {_by(volume.shape)}, but {subject.images[0].name} has {_by(shape)}; "
                "the volumes of a subject must be 3-D and of one shape"
            )
        if not np.isfinite(volume).all():
            raise DataError(f"{path} holds values that are not finite numbers")
    return Volumes(np.stack(volumes[:-1]).astype(np.float32, copy=False), _read_labels(subject.truth, volumes[-1]))


def _read_labels(path: Path, volume: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    values = set(np.unique(volume).tolist())
    if values <= {0}:
        raise DataError(f"{path} marks no tumour: all of its {volume.size} voxels are 0; take the subject out")
    unknown = values - {0, 1, 2, 3, 4}
    if unknown or {3, 4} <= values:
        raise DataError(
            f"{path} holds the labels {sorted(values)}; expected are 0, 1, 2 and either 4 (to 2021) or 3 (since 2023)"
        )
    labels = volume.astype(np.uint8)
    labels[labels == 3] = 4
    return labels


def _read_volume(path: Path) -> npt.NDArray[Any]:
    nibabel = require("nibabel", "reading NIfTI volumes")
    try:
        return np.asanyarray(nibabel.load(path).dataobj)
    except EOFError as error:
        raise DataError(f"{path} ends in the middle of its data; copy or download it again") from error
    except (OSError, ValueError, zlib.error, nibabel.filebasedimages.ImageFileError) as error:
        raise DataError(f"{path} cannot be read as NIfTI ({error}); copy or download it again") from error


def require(package: str, purpose: str) -> Any:
    """Imports an optional package.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{purpose} needs the package {error.name}, which is not installed; pip install 'lmswap[bench]'"
        ) from error


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
