import sys

import nibabel
import numpy as np
import pytest

from benchmarks.unet3d import synthetic
from benchmarks.unet3d.brats import MODALITIES, DataError, find_subjects, read_subject


@pytest.fixture(scope="module")
def subject():
    return synthetic.make_subject(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "subjects"
    synthetic.make_subjects(root, 1)
    return root


def box_of(volume):
    return [int(where.max() + 1 - where.min()) for where in np.nonzero(volume)]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_voxels(subject):
    again, other = synthetic.make_subject(0), synthetic.make_subject(0, seed=1)
    np.testing.assert_array_equal(subject.images, again.images)
    np.testing.assert_array_equal(subject.labels, again.labels)
    assert (subject.labels != other.labels).any()


def test_the_brain_fills_a_box_of_the_case_study(subject):
    box = box_of(subject.images.any(axis=0))
    assert all(low <= side <= high for low, side, high in zip((124, 151, 121), box, (159, 191, 150), strict=True))
    assert box_of(subject.images[0]) == box  # each modality covers the whole brain


def test_the_tumour_is_nested_and_inside_the_brain(subject):
    labels = subject.labels
    assert set(np.unique(labels)) == {0, 1, 2, 4}
    assert subject.images.all(axis=0)[labels > 0].all()
    core = np.argwhere(labels == 1).mean(axis=0)
    far = [np.linalg.norm(np.argwhere(labels == label) - core, axis=1).mean() for label in (1, 4, 2)]
    assert far == sorted(far)


def test_each_contrast_shows_what_it_shows_in_patients(subject):
    def brightness(modality, where):
        return subject.images[MODALITIES.index(modality)][where].mean()

    healthy = subject.images.any(axis=0) & (subject.labels == 0)
    assert brightness("t1ce", subject.labels == 4) > 1.3 * brightness("t1ce", healthy)
    assert brightness("flair", subject.labels == 2) > 1.3 * brightness("flair", healthy)
    assert brightness("t1", subject.labels == 1) < brightness("t1", healthy)


def test_files_are_as_brats_has_them(made, subject):
    (found,) = find_subjects(made)
    assert [path.name for path in found.files] == [
        f"Synthetic_00000_{kind}.nii.gz" for kind in ("t1", "t1ce", "flair", "t2", "seg")
    ]
    images = [nibabel.load(path) for path in found.files]
    assert {image.shape for image in images} == {(240, 240, 155)}
    assert [image.get_data_dtype() for image in images] == [np.int16] * 4 + [np.uint8]
    for image in images:
        np.testing.assert_array_equal(image.affine, synthetic.LPS_AFFINE)
        assert nibabel.aff2axcodes(image.affine) == ("L", "P", "S")
    read = read_subject(found)
    np.testing.assert_array_equal(read.images, subject.images)
    np.testing.assert_array_equal(read.labels, subject.labels)


def test_the_folder_names_its_content_and_the_source_of_the_anatomy(made):
    notice = (made / "NOTICE.txt").read_text()
    assert "Copyright (C) 1993-2009 Louis Collins, McConnell Brain Imaging Centre" in notice
    assert "not BraTS" in notice
    assert synthetic.is_made(made)
    assert not synthetic.is_made(made.parent)


def test_only_missing_subjects_are_made(made, monkeypatch):
    monkeypatch.setattr(synthetic, "make_subject", lambda *_, **__: pytest.fail("the subject was there"))
    synthetic.make_subjects(made, 1)


def test_refuses_a_folder_that_holds_something_else(made, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DataError, match="not empty"):
        synthetic.make_subjects(tmp_path, 1)
    with pytest.raises(DataError, match="made otherwise"):
        synthetic.make_subjects(made, 1, seed=7)


def test_a_failure_leaves_no_half_subject(subject, tmp_path, monkeypatch):
    save = nibabel.save

    def full_disk(image, path):
        if path.name.endswith("flair.nii.gz"):
            raise OSError(28, "No space left on device")
        save(image, path)

    monkeypatch.setattr(synthetic, "make_subject", lambda *_, **__: subject)
    monkeypatch.setattr(nibabel, "save", full_disk)
    with pytest.raises(DataError, match=r"Synthetic_00000 cannot be written \(No space left on device\)"):
        synthetic.make_subjects(tmp_path / "subjects", 1)
    assert sorted(path.name for path in (tmp_path / "subjects").iterdir()) == ["NOTICE.txt", synthetic.MARKER]


def test_a_missing_nilearn_is_reported_with_the_remedy(monkeypatch):
    synthetic._template.cache_clear()
    monkeypatch.setitem(sys.modules, "nilearn.datasets", None)
    with pytest.raises(DataError, match=r"needs the package nilearn.*pip install 'lmswap\[bench\]'"):
        synthetic.make_subject(0)
