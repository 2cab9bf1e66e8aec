"""Finds and reads subjects in the folder layouts of BraTS 2017, 2020, 2021 and 2023.

A subject is a folder of five volumes, ``<case>_<kind>.nii.gz``. The releases differ in the separator (``_`` or ``-``),
the names of the kinds, compression, nesting (HGG/LGG), and the number of the enhancing tumour (4; since 2023: 3).
"""

from __future__ import annotations

import importlib
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODALITIES = ("t1", "t1ce", "flair", "t2")
LABELS = (1, 2, 4)  # necrotic core, oedema, enhancing tumour
TRUTH = "seg"
FOREGROUND_TOLERANCE = 1e-5  # voxels up to here are background

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


_MAX_PACKED = 1032  # times that deflate can make a file smaller
_MAX_LABELS = 10  # that are listed: where images lie in the place of labels there are thousands


class DataError(Exception):
    """Scans that cannot be used, or a package that reading them needs; the message names the file and what to do."""


class DamagedSubject(DataError):
    """A subject that cannot be used; each of its ``faults`` is a sentence that names the file and what to do."""

    def __init__(self, name: str, faults: Sequence[str]) -> None:
        self.name, self.faults = name, tuple(faults)
        super().__init__("\n".join(faults))


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
    """Lists the subjects anywhere under ``root``, by folder and name.

    Raises:
        DataError: no subjects there, or subjects with missing or doubled files; it names all of them.
    """
    subjects, damaged = survey_subjects(root)
    if damaged:
        raise DataError("\n".join(map(str, damaged)))
    return subjects


def survey_subjects(root: Path) -> tuple[list[Subject], list[DamagedSubject]]:
    """Lists the subjects anywhere under ``root``, complete ones and others, by folder and name; opens no file.

    Raises:
        DataError: no subjects there, or a folder that may not be read.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give the folder that holds the BraTS subjects")
    found: dict[tuple[Path, str], dict[str, list[Path]]] = {}
    for path in sorted(_files(root)):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            files = found.setdefault((path.parent, match["case"]), {})
            files.setdefault(_KIND_OF_SUFFIX[match["suffix"].lower()], []).append(path)
    if not found:
        raise DataError(
            f"{root} has no BraTS subjects: no file below it is named like <case>_t1.nii.gz or <case>-t1n.nii.gz"
        )
    subjects: list[Subject] = []
    damaged: list[DamagedSubject] = []
    folders: dict[str, Path] = {}
    for (folder, case), files in sorted(found.items()):
        faults = list(_missing_or_doubled(folder, case, files))
        if folders.setdefault(case, folder) != folder:
            faults.append(f"subject {case} is in {folders[case]} and in {folder}; keep one")
        if faults:
            damaged.append(DamagedSubject(case, faults))
        else:
            subjects.append(Subject(case, tuple(files[kind][0] for kind in MODALITIES), files[TRUTH][0]))
    return subjects, damaged


def _files(root: Path) -> Iterator[Path]:
    """All files under ``root``, each once, also in linked folders: a choice of subjects is often a folder of links."""

    def refuse(error: OSError) -> None:  # else its subjects would be missing without a word
        raise DataError(f"{error.filename} cannot be listed ({error.strerror}); allow it, or take the folder out")

    seen: set[Path] = set()
    for folder, inner, names in os.walk(root, onerror=refuse, followlinks=True):
        real = Path(folder).resolve()
        if real in seen:  # links lead to it twice, or in a circle
            inner.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in names)


def _missing_or_doubled(folder: Path, case: str, files: dict[str, list[Path]]) -> Iterator[str]:
    for kind, paths in files.items():
        if len(paths) > 1:
            yield f"{folder} has two files for '{kind}': {paths[0].name} and {paths[1].name}; keep one"
    missing = [kind for kind in (*MODALITIES, TRUTH) if kind not in files]
    if missing:
        known = {path.name for paths in files.values() for path in paths}
        others = sorted({path.name for path in folder.iterdir()} - known)
        yield (
            f"subject {case} in {folder} has no file for {', '.join(missing)}"
            + (f"; other files there: {', '.join(others)}" if others else "")
            + "; complete the subject or take it out of the folder"
        )


def read_subject(subject: Subject) -> Volumes:
    """Reads all five volumes; the enhancing tumour is 4 whatever the release calls it.

    Raises:
        DamagedSubject: files are damaged, not 3-D, of another shape than the first, or hold values that are not real
            numbers or not finite ones; the images hold nothing, or the truth holds unknown labels or none at all. All
            faults are named.
    """
    volumes: dict[Path, npt.NDArray[Any]] = {}
    faults: list[str] = []
    for path in subject.files:
        try:
            volumes[path] = _read_volume(path)
        except DataError as error:
            faults.append(str(error))
    faults.extend(fault for path in volumes for fault in _volume_faults(path, volumes))
    if subject.truth in volumes:
        faults.extend(_label_faults(subject.truth, volumes[subject.truth]))
    if not any(path not in volumes or (np.abs(volumes[path]) > FOREGROUND_TOLERANCE).any() for path in subject.images):
        faults.append(f"{subject.images[0].parent} has images that hold nothing but 0; take the subject out")
    if faults:
        raise DamagedSubject(subject.name, faults)
    labels = volumes[subject.truth].astype(np.uint8)
    labels[labels == 3] = 4
    return Volumes(np.stack([volumes[path] for path in subject.images]).astype(np.float32, copy=False), labels)


def _volume_faults(path: Path, volumes: dict[Path, npt.NDArray[Any]]) -> Iterator[str]:
    first, volume = next(iter(volumes)), volumes[path]
    if volume.ndim != 3 or volume.shape != volumes[first].shape:
        yield (
            f"{path} has shape {_by(volume.shape)}, but {first.name} has {_by(volumes[first].shape)}; "
            "the volumes of a subject must be 3-D and of one shape"
        )
    if not (np.abs(volume) <= np.finfo(np.float32).max).all():
        yield f"{path} holds values that are not finite numbers, or too large for float32"


def _label_faults(path: Path, volume: npt.NDArray[Any]) -> Iterator[str]:
    values = set(np.unique(volume).tolist())
    shown = ", ".join(map(str, sorted(values)[:_MAX_LABELS])) + ", …" * (len(values) > _MAX_LABELS)
    unknown = values - {0, 1, 2, 3, 4}
    if values <= {0}:
        yield f"{path} marks no tumour: all of its {volume.size} voxels are 0; take the subject out"
    elif unknown or {3, 4} <= values:
        yield f"{path} holds the labels [{shown}]; expected are 0, 1, 2 and either 4 (to 2021) or 3 (since 2023)"


def _read_volume(path: Path) -> npt.NDArray[Any]:
    nibabel = require("nibabel", "reading NIfTI volumes")
    errors = nibabel.spatialimages.HeaderDataError, nibabel.filebasedimages.ImageFileError
    try:
        image = nibabel.load(path)
        _check_size(path, image)
        volume: npt.NDArray[Any] = np.asanyarray(image.dataobj)
    except EOFError as error:
        raise DataError(f"{path} ends in the middle of its data; copy or download it again") from error
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, zlib.error, *errors) as error:
        raise DataError(f"{path} cannot be read as NIfTI ({error}); copy or download it again") from error
    if volume.dtype.kind not in "biuf":
        raise DataError(f"{path} holds values of type {volume.dtype}, not real numbers; convert it")
    return volume


def _check_size(path: Path, image: Any) -> None:
    """Refuses a header that promises more than the file can hold, before memory is taken for it."""
    nbytes = math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize
    max_bytes = path.stat().st_size * (_MAX_PACKED if path.name.lower().endswith(".gz") else 1)
    if nbytes < 0 or nbytes > max_bytes:
        raise ValueError(f"its header promises {_by(image.shape)} values, more than the file can hold")


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
