import numpy as np
import pytest
import torch

from benchmarks.unet3d import preprocess
from benchmarks.unet3d.brats import DataError, Volumes, find_subjects, read_subject
from benchmarks.unet3d.preprocess import (
    crop,
    foreground_box,
    load_cubes,
    load_labels,
    load_place,
    prepare_cube,
    resample,
)
from tests.benchmarks.unet3d.scans import make_subject, random_volumes, write_subject


def volumes():
    *images, labels = random_volumes()
    return Volumes(np.stack(images).astype(np.float32), labels)


def as_cube(subject):
    whole = read_subject(subject)
    return resample(crop(whole, foreground_box(whole.images)), 16)


def test_crops_to_any_modality_with_a_margin_of_one_voxel():
    given = volumes()
    given.images[2, 11, 5, 3] = 7.0  # outside the others' box, at the border of the volume
    cropped = crop(given, foreground_box(given.images))
    assert cropped.images.shape == (4, 11, 7, 8)
    np.testing.assert_array_equal(cropped.images, given.images[:, 1:12, 2:9, 0:8])
    np.testing.assert_array_equal(cropped.labels, given.labels[1:12, 2:9, 0:8])


def test_resampling_to_the_same_size_changes_nothing():
    cube = Volumes(np.random.default_rng(0).random((4, 8, 8, 8), np.float32), volumes().labels[:8, :8, :8])
    same = resample(cube, 8)
    np.testing.assert_array_equal(same.images, cube.images)
    np.testing.assert_array_equal(same.labels, cube.labels)


def test_images_are_resampled_linearly_with_borders_aligned():
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None] + 0.5, (4, 8, 6, 5))
    finer = resample(Volumes(ramp, np.zeros((8, 6, 5), np.uint8)), 16).images
    np.testing.assert_allclose(finer[0, 1:-1, 3, 3], (np.arange(16) + 0.5)[1:-1] / 2, rtol=1e-6)


def test_labels_are_resampled_to_the_nearest():
    labels = np.zeros((4, 4, 4), np.uint8)
    labels[2:, :, :] = 4
    finer = resample(Volumes(np.zeros((4, 4, 4, 4), np.float32), labels), 6).labels
    np.testing.assert_array_equal(finer[:, 0, 0], [0, 0, 0, 4, 4, 4])
    assert set(np.unique(resample(volumes(), 7).labels)) <= {0, 1, 2, 4}


def test_normalises_each_modality_over_the_data_set(tmp_path):
    paths = [prepare_cube(make_subject(tmp_path, f"case_{seed}", seed), 16, tmp_path / "cache") for seed in (1, 2)]
    raw = [as_cube(make_subject(tmp_path, f"case_{seed}", seed)) for seed in (1, 2)]
    cubes = load_cubes(paths)
    assert cubes.images.dtype is cubes.truth.dtype is torch.float32
    for modality in range(4):
        both = [volume.images[modality].astype(np.float64) for volume in raw]
        mean, std = np.mean([v.mean() for v in both]), np.mean([v.std() for v in both])
        for subject, volume in enumerate(both):
            np.testing.assert_allclose(cubes.images[subject, modality], (volume - mean) / std, atol=1e-5)


def test_a_modality_empty_in_all_subjects_is_named(tmp_path):
    images = random_volumes()
    images[1] = np.zeros_like(images[1])
    write_subject(tmp_path / "case_1", "case_1", images)
    (subject,) = find_subjects(tmp_path)
    with pytest.raises(DataError, match="t1ce has one value throughout in all 1 subjects"):
        load_cubes([prepare_cube(subject, 16, tmp_path / "cache")])


def test_truth_has_a_channel_for_each_of_1_2_and_4(tmp_path):
    path = prepare_cube(make_subject(tmp_path), 16, tmp_path / "cache")
    labels = as_cube(make_subject(tmp_path)).labels
    truth = load_cubes([path]).truth
    assert truth.shape == (1, 3, 16, 16, 16)
    for channel, label in enumerate((1, 2, 4)):
        np.testing.assert_array_equal(truth[0, channel], labels == label)


def test_a_cube_is_made_once_and_again_when_the_scans_change(tmp_path, monkeypatch):
    cache, subject = tmp_path / "cache", make_subject(tmp_path)
    first = prepare_cube(subject, 16, cache)
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "read_subject", lambda _: pytest.fail("the cube was in the cache"))
        assert prepare_cube(subject, 16, cache) == first
    assert prepare_cube(subject, 32, cache) != first
    write_subject(tmp_path / "case_1", "case_1", random_volumes(seed=9))
    assert prepare_cube(subject, 16, cache) != first


def test_a_failure_leaves_no_half_cube(tmp_path, monkeypatch):
    def full_disk(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(DataError, match=r"case_1-16-.*npz cannot be written \(No space left on device\)"):
        prepare_cube(make_subject(tmp_path), 16, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cube_knows_where_it_was_cut_from(tmp_path):
    subject = make_subject(tmp_path)
    path = prepare_cube(subject, 16, tmp_path / "cache")
    place, whole = load_place(path), read_subject(subject)
    assert place.shape == whole.labels.shape == (12, 10, 8)
    assert place.box == (slice(1, 11), slice(2, 9), slice(0, 8))
    np.testing.assert_array_equal(load_labels(path), resample(crop(whole, place.box), 16).labels)


def other_compression(data):
    entry = data.index(b"PK\x01\x02")
    return data[: entry + 10] + b"\x63" + data[entry + 11 :]


@pytest.mark.parametrize("harm", [lambda data: data[:-100], other_compression])
def test_a_damaged_cube_is_named(tmp_path, harm):
    path = prepare_cube(make_subject(tmp_path), 16, tmp_path / "cache")
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{path.name} cannot be read as a prepared cube"):
        load_cubes([path])
