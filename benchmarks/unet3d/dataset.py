"""The subjects of a data set, those that cannot be used, and their cubes."""

from __future__ import annotations

from collections.abc import Callable, Collection
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


def made_folder(folder: Path) -> Path:
    """Where under a working folder the synthetic subjects are."""
    return folder / "subjects"


def make_data(folder: Path, count: int) -> list[str]:
    """Makes sure that ``count`` subjects with synthetic tumours are there, and returns their names."""
    synthetic.make_subjects(made_folder(folder), count)
    return [synthetic.subject_name(index) for index in range(count)]


def prepare_data(
    root: Path, size: int, cache: Path, on_subject: OnSubject, *, names: Collection[str] | None = None
) -> DataSet:
    """Bring subjects into the cache as cubes.

    That reads each subject once and finds its faults; a cube that is in the cache was read before, and scans that
    changed since have another cube.

    Args:
        root: the folder of the subjects, in BraTS' layout.
        size: voxels along a side of a cube.
        cache: the folder of the cubes.
        on_subject: called before each subject with the number done and the number of all.
        names: the subjects; None: all under ``root``.

    Returns:
        The cubes by subject, and the damaged subjects with their faults.

    Raises:
        DataError: no subjects there, not all of ``names``, or none that can be used.
    """
    found, damaged = survey_subjects(root)
    known = {subject.name for subject in found} | {subject.name for subject in damaged}
    wanted = known if names is None else set(names)
    if wanted - known:
        raise DataError(f"{root} has no subject {', '.join(sorted(wanted - known)[:5])}; it has {len(known)} others")
    damaged = [subject for subject in damaged if subject.name in wanted]
    subjects: dict[str, Subject] = {}
    cubes: dict[str, Path] = {}
    usable = sorted((subject for subject in found if subject.name in wanted), key=lambda subject: subject.name)
    for done, subject in enumerate(usable):
        on_subject(done, len(usable))
        try:
            cubes[subject.name] = prepare_cube(subject, size, cache)
            subjects[subject.name] = subject
        except DamagedSubject as error:
            damaged.append(error)
    kind = synthetic.DATA_KIND if synthetic.is_made(root) else "BraTS layout, as given"
    data = DataSet(root, kind, subjects, cubes, tuple(damaged))
    if not subjects:
        data.require_whole("none is left")
    return data
