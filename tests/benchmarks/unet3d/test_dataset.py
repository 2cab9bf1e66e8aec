import numpy as np
import pytest

from benchmarks.unet3d import preprocess
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.dataset import prepare_data
from tests.benchmarks.unet3d.scans import make_subject, make_subjects, random_volumes, write_subject


@pytest.fixture
def root(tmp_path):
    """Five subjects: one complete, one without a modality, one of wrong shape, one without labels, one cut off."""
    root = tmp_path / "scans"
    make_subjects(root, 5)
    (root / "case_1" / "case_1_flair.nii.gz").unlink()
    write_subject(root / "case_2", "case_2", [np.ones((12, 10, 9), np.int16)], suffixes=("t2",))
    write_subject(root / "case_3", "case_3", [np.zeros((12, 10, 8), np.uint8)], suffixes=("seg",))
    cut = root / "case_4" / "case_4_t1.nii.gz"
    cut.write_bytes(cut.read_bytes()[:-40])
    return root


def prepare(root, tmp_path, **options):
    return prepare_data(root, 16, tmp_path / "cubes", lambda done, total: None, **options)


def test_every_damaged_subject_is_named_with_its_file_and_counted(root, tmp_path):
    data = prepare(root, tmp_path)
    assert list(data.subjects) == list(data.cubes) == ["case_0"]
    with pytest.raises(DataError) as caught:
        data.require_whole("do something")
    first, *faults, last = str(caught.value).split("\n")
    assert first == "4 faults in 4 of 5 subjects:" and last == "do something"
    for fault, words in zip(
        faults,
        ("no file for flair", "case_2_t2.nii.gz has shape 12×10×9", "case_3_seg.nii.gz marks no tumour",
         "case_4_t1.nii.gz ends in the middle"),
        strict=True,
    ):  # fmt: skip
        assert words in fault


def test_a_second_start_reads_no_scan_again_but_damaged_ones(root, tmp_path, monkeypatch):
    first = prepare(root, tmp_path)
    read, read_subject = [], preprocess.read_subject
    monkeypatch.setattr(preprocess, "read_subject", lambda subject: read.append(subject.name) or read_subject(subject))
    again = prepare(root, tmp_path)
    assert (again.cubes, again.faults) == (first.cubes, first.faults)
    assert read == ["case_2", "case_3", "case_4"]


def test_a_repaired_subject_is_used(root, tmp_path):
    prepare(root, tmp_path)
    write_subject(root / "case_2", "case_2", random_volumes(2))
    assert list(prepare(root, tmp_path).subjects) == ["case_0", "case_2"]


def test_takes_the_subjects_that_are_named(root, tmp_path):
    data = prepare(root, tmp_path, names=["case_1", "case_0"])
    assert list(data.subjects) == ["case_0"] and [subject.name for subject in data.damaged] == ["case_1"]
    with pytest.raises(DataError, match="scans has no subject case_9; it has 5 others"):
        prepare(root, tmp_path, names=["case_0", "case_9"])


def test_a_data_set_without_usable_subjects_is_refused(root, tmp_path):
    (root / "case_0" / "case_0_seg.nii.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"5 faults in 5 of 5 subjects:"):
        prepare(root, tmp_path)


def test_a_whole_data_set_is_not_refused(tmp_path):
    make_subject(tmp_path / "scans")
    prepare(tmp_path / "scans", tmp_path).require_whole("nothing to do")
