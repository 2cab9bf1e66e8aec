"""Which subjects does a data set have, which of them cannot be used, and where are their cubes?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.unet3d import synthetic
from benchmarks.unet3d.brats import DamagedSubject, DataError, Subject, survey_subjects
from benchmarks.unet3d.preprocess import prepare_cube

OnSubject = Callable[[int, int], None]


@dataclass(frozen=True)
class DataSet:
    """The usable subjects by name, in order, their cubes of one size, and the subjects that cannot be used."""

    root: Path
    kind: str
    subjects: dict[str, Subject]
    cubes: dict[str, Path]
    damaged: tuple[DamagedSubject, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the damaged subjects, a sentence each."""
        return tuple(fault for subject in self.damaged for fault in subject.faults)

    def require_whole(self, advice: str) -> None:
        """Refuses a data set with damaged subjects.

        Raises:
            DataError: counts the faults, names each, and ends with ``advice``.
        """
        if self.damaged:
            count = len(self.subjects) + len(self.damaged)
            raise DataError("\n".join([f"{self.describe_faults()} of {count} subjects:", *self.faults, advice]))

    def describe_faults(self) -> str:
        """How many there are, in how many subjects."""
        return f"{len(self.faults)} fault{'s' * (len(self.faults) != 1)} in {len(self.damaged)}"


def make_data(folder: Path, count: int) -> Path:
    """Makes sure that ``count`` subjects with synthetic tumours are in ``folder``, and returns where they are."""
    root = folder / "subjects"
    synthetic.make_subjects(root, count)
    return root


def prepare_data(root: Path, size: int, cache: Path, on_subject: OnSubject, *, count: int | None = None) -> DataSet:
    """Brings the first ``count`` subjects under ``root`` (None: all) into the cache as cubes of ``size``.

    That reads each subject once and finds its faults; a cube that is in the cache was read before, and scans that
    changed since have another cube. ``on_subject`` hears how many of how many are done.

    Raises:
        DataError: no subjects there, or none that can be used.
    """
    found, damaged = survey_subjects(root)
    names = sorted({subject.name for subject in found} | {subject.name for subject in damaged})[:count]
    damaged = [subject for subject in damaged if subject.name in names]
    subjects: dict[str, Subject] = {}
    cubes: dict[str, Path] = {}
    for done, subject in enumerate(sorted(found, key=lambda subject: subject.name)):
        if subject.name not in names:
            continue
        on_subject(done, len(names))
        try:
            cubes[subject.name] = prepare_cube(subject, size, cache)
            subjects[subject.name] = subject
        except DamagedSubject as error:
            damaged.append(error)
    on_subject(len(names), len(names))
    kind = synthetic.DATA_KIND if synthetic.is_made(root) else "BraTS layout, as given"
    data = DataSet(root, kind, subjects, cubes, tuple(damaged))
    if not subjects:
        data.require_whole("none is left")
    return data
