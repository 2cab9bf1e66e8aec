import errno
import gzip
import os
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from benchmarks.unet3d.brats import DamagedSubject, DataError, find_subjects, read_subject, survey_subjects
from tests.benchmarks.unet3d.scans import KINDS, make_subject, random_volumes, write_subject

LAYOUTS = {
    "2017": ("HGG/Brats17_CBICA_AAB_1", "Brats17_CBICA_AAB_1", "_", KINDS, ".nii.gz", 4),
    "2017-tcia": ("pre/TCGA-02", "TCGA-02_1999.01.01", "_",
                  ("t1", "t1Gd", "flair", "t2", "GlistrBoost_ManuallyCorrected"), ".nii.gz", 4),
    "2020": ("MICCAI_BraTS2020_TrainingData/BraTS20_Training_001", "BraTS20_Training_001", "_", KINDS, ".nii", 4),
    "2021": ("BraTS2021_00000", "BraTS2021_00000", "_", KINDS, ".nii.gz", 4),
    "2023": ("BraTS-GLI-00000-000", "BraTS-GLI-00000-000", "-", ("t1n", "t1c", "t2f", "t2w", "seg"), ".nii.gz", 3),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_the_layout_of_each_release(tmp_path, layout):
    folder, case, separator, suffixes, ending, enhancing = LAYOUTS[layout]
    volumes = random_volumes(enhancing=enhancing)
    write_subject(tmp_path / folder, case, volumes, separator=separator, suffixes=suffixes, ending=ending)
    (subject,) = find_subjects(tmp_path)
    assert subject.name == case
    read = read_subject(subject)
    assert read.images.dtype == np.float32 and read.labels.dtype == np.uint8
    np.testing.assert_array_equal(read.images, volumes[:4])
    np.testing.assert_array_equal(read.labels, random_volumes(enhancing=4)[4])


def test_finds_nested_subjects_by_name_and_passes_over_other_files(tmp_path):
    for folder, case in (("LGG", "case_2"), ("HGG", "case_3"), ("HGG", "case_1")):
        write_subject(tmp_path / folder / case, case, random_volumes())
    (tmp_path / "survival.csv").write_text("x")
    (tmp_path / "HGG" / "case_1" / "._case_1_t1.nii.gz").write_bytes(b"left by a file manager")
    write_subject(tmp_path / "HGG" / "case_1", "case_1_glistr", random_volumes()[:1], suffixes=("GlistrBoost",))
    assert [subject.name for subject in find_subjects(tmp_path)] == ["case_1", "case_3", "case_2"]


def test_finds_files_whose_endings_are_in_capitals(tmp_path):
    make_subject(tmp_path)
    for path in list((tmp_path / "case_1").iterdir()):
        path.rename(path.with_name(path.name.upper()))
    (subject,) = find_subjects(tmp_path)
    np.testing.assert_array_equal(read_subject(subject).images, random_volumes()[:4])


def test_links_to_folders_are_followed_once_also_in_circles(tmp_path):
    make_subject(tmp_path / "archive")
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "first").symlink_to(tmp_path / "archive" / "case_1")
    (chosen / "again").symlink_to(tmp_path / "archive")
    (chosen / "all").symlink_to(chosen)
    (subject,) = find_subjects(chosen)
    assert subject.truth.resolve() == tmp_path / "archive" / "case_1" / "case_1_seg.nii.gz"


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    make_subject(tmp_path, "case_1")
    make_subject(tmp_path, "case_2")
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("case_2"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"case_2 cannot be listed \(Permission denied\)"):
        find_subjects(tmp_path)


def test_applies_the_scale_of_the_header(tmp_path):
    subject = make_subject(tmp_path)
    image = nibabel.Nifti1Image(random_volumes()[0], np.eye(4))
    image.header.set_slope_inter(2.0, 5.0)
    nibabel.save(image, subject.images[0])
    expected = nibabel.load(subject.images[0]).get_fdata()
    np.testing.assert_array_equal(read_subject(subject).images[0], expected.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_names_the_missing_file(tmp_path, kind):
    subject = make_subject(tmp_path)
    (tmp_path / "case_1" / f"case_1_{kind}.nii.gz").rename(tmp_path / "case_1" / "W39_Segm.nii")
    with pytest.raises(DataError, match=rf"case_1 in .*case_1 has no file for {kind}; other files there: W39_Segm"):
        find_subjects(tmp_path)
    assert subject.name == "case_1"


def test_refuses_two_files_for_one_modality(tmp_path):
    make_subject(tmp_path)
    write_subject(tmp_path / "case_1", "case_1", random_volumes()[:1], suffixes=("t1",), ending=".nii")
    with pytest.raises(DataError, match=r"two files for 't1': case_1_t1\.nii and case_1_t1\.nii\.gz"):
        find_subjects(tmp_path)


def test_a_folder_without_subjects_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no BraTS subjects"):
        find_subjects(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        find_subjects(tmp_path / "nowhere")


def replaced(volumes, index, volume):
    return [*volumes[:index], volume, *volumes[index + 1 :]]


def nan_volume():
    volume = random_volumes()[1].astype(np.float32)
    volume[0, 0, 0] = np.nan
    return volume


@pytest.mark.parametrize(
    ("index", "volume", "message"),
    [
        (2, np.zeros((12, 10, 9), np.int16), r"flair\.nii\.gz has shape 12×10×9, but .*t1\.nii\.gz has 12×10×8"),
        (4, np.zeros((12, 10, 8, 1), np.uint8), r"seg\.nii\.gz has shape 12×10×8×1"),
        (1, nan_volume(), r"t1ce\.nii\.gz holds values that are not finite"),
        (4, np.zeros((12, 10, 8), np.uint8), r"seg\.nii\.gz marks no tumour"),
        (4, np.full((12, 10, 8), 5, np.uint8), r"seg\.nii\.gz holds the labels \[5"),
        (4, np.full((12, 10, 8), 1.5, np.float32), r"seg\.nii\.gz holds the labels \[1\.5"),
        (4, np.arange(960).reshape(12, 10, 8).astype(np.uint8) % 5, r"seg\.nii\.gz holds the labels \[0, 1, 2, 3, 4"),
        (
            4,
            np.arange(960).reshape(12, 10, 8).astype(np.int16),
            r"\[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …\]; expected",
        ),
        (
            0,
            np.full((12, 10, 8), 1e300),
            r"t1\.nii\.gz holds values that .* or too large for float32",
        ),
        (0, np.ones((12, 10, 8), np.complex64), r"t1\.nii\.gz holds values of type complex64, not real numbers"),
        (4, np.ones((12, 10, 8), np.complex64), r"seg\.nii\.gz holds values of type complex64, not real numbers"),
        (
            2,
            np.zeros((12, 10, 8), [(name, np.uint8) for name in "RGB"]),
            r"flair\.nii\.gz holds values of type .*'R'",
        ),
    ],
)
def test_names_the_file_that_is_wrong(tmp_path, index, volume, message):
    write_subject(tmp_path / "case_1", "case_1", replaced(random_volumes(), index, volume))
    with pytest.raises(DataError, match=message):
        read_subject(find_subjects(tmp_path)[0])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path.write_bytes(data)


def pack_text(path):
    path.write_bytes(gzip.compress(b"not an image" * 100))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "ending"),
    [(truncate, ".nii.gz"), (truncate, ".nii"), (damage, ".nii.gz"), (pack_text, ".nii.gz"), (empty, ".nii")],
)
def test_names_the_file_that_is_damaged(tmp_path, harm, ending):
    write_subject(tmp_path / "case_1", "case_1", random_volumes(), ending=ending)
    (subject,) = find_subjects(tmp_path)
    harm(subject.images[3])
    with pytest.raises(DataError, match=r"case_1_t2\.nii.* (ends in the middle|cannot be read as NIfTI)"):
        read_subject(subject)


def test_names_every_fault_of_a_subject(tmp_path):
    volumes = replaced(replaced(random_volumes(), 4, np.zeros((12, 10, 8), np.uint8)), 1, nan_volume())
    write_subject(tmp_path / "case_1", "case_1", volumes)
    (subject,) = find_subjects(tmp_path)
    truncate(subject.images[3])
    with pytest.raises(DamagedSubject) as caught:
        read_subject(subject)
    assert caught.value.name == "case_1"
    files = ["case_1_t2.nii.gz", "case_1_t1ce.nii.gz", "case_1_seg.nii.gz"]
    assert [Path(fault.split()[0]).name for fault in caught.value.faults] == files


@pytest.mark.parametrize("value", [0, 1e-6])
def test_refuses_images_without_a_brain(tmp_path, value):
    write_subject(tmp_path / "case_1", "case_1", [np.full((12, 10, 8), value, np.float32)] * 4 + random_volumes()[4:])
    with pytest.raises(DamagedSubject, match="case_1 has images that hold nothing but 0"):
        read_subject(find_subjects(tmp_path)[0])


def test_a_survey_lists_complete_subjects_and_what_the_others_lack(tmp_path):
    for folder, case in (("HGG", "case_1"), ("HGG", "case_2"), ("LGG", "case_1"), ("LGG", "case_3")):
        write_subject(tmp_path / folder / case, case, random_volumes())
    (tmp_path / "LGG" / "case_3" / "case_3_t2.nii.gz").unlink()
    subjects, damaged = survey_subjects(tmp_path)
    assert [subject.name for subject in subjects] == ["case_1", "case_2"]
    assert [fault.name for fault in damaged] == ["case_1", "case_3"]
    assert "HGG/case_1 and in" in str(damaged[0]) and "no file for t2" in str(damaged[1])
    with pytest.raises(DataError, match=r"(?s)LGG/case_1; keep one.*no file for t2"):
        find_subjects(tmp_path)


def test_a_missing_nibabel_is_reported_with_the_remedy(tmp_path, monkeypatch):
    subject = make_subject(tmp_path)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(DataError, match=r"needs the package nibabel.*pip install 'lmswap\[bench\]'"):
        read_subject(subject)
