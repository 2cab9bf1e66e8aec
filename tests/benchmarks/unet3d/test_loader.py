from itertools import islice

import numpy as np
import pytest
import torch

from benchmarks.unet3d.augment import SYMMETRIES, UNMOVED
from benchmarks.unet3d.loader import CubeFiles, EpochSampler, draw_epoch, training_loader, validation_loader
from benchmarks.unet3d.preprocess import load_cubes, measure_normalization, prepare_cube
from tests.benchmarks.unet3d.scans import make_subject


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("scans")
    return [prepare_cube(make_subject(root, f"case_{n}", n), 16, root / "cache") for n in range(3)]


@pytest.fixture
def cubes(paths):
    return CubeFiles(paths, measure_normalization(paths))


def test_an_epoch_has_every_subject_once_in_its_own_order_and_positions():
    epochs = [draw_epoch(0, epoch, 20) for epoch in range(40)]
    assert all(sorted(subject for subject, _ in draws) == list(range(20)) for draws in epochs)
    assert len({tuple(draws) for draws in epochs}) == 40
    assert {symmetry for draws in epochs for _, symmetry in draws} == set(range(48))
    assert draw_epoch(0, 3, 20) == epochs[3] != draw_epoch(1, 3, 20)


def test_positions_are_drawn_evenly():
    counts = np.bincount([symmetry for epoch in range(100) for _, symmetry in draw_epoch(0, epoch, 48)])
    assert abs(counts - 100).max() < 5 * 10  # five standard deviations of a count of 100


def test_subjects_come_drawn_normalised_and_moved_with_their_truth(cubes, paths):
    whole, sampler = load_cubes(paths), EpochSampler(5, 3)
    loader = training_loader(cubes, sampler, workers=0)
    for epoch in range(2):
        sampler.start(epoch, 0)
        for (images, truth), (subject, symmetry) in zip(loader, draw_epoch(5, epoch, 3), strict=True):
            assert torch.equal(images[0], SYMMETRIES[symmetry].apply(whole.images[subject]))
            assert torch.equal(truth[0], SYMMETRIES[symmetry].apply(whole.truth[subject]))


def test_an_interrupted_epoch_resumes(cubes):
    sampler = EpochSampler(5, 3)
    loader = training_loader(cubes, sampler, workers=0)
    sampler.start(4, 0)
    rest = [images for images, _ in islice(loader, 1, None)]
    sampler.start(4, 1)
    assert all(torch.equal(images, expected) for (images, _), expected in zip(loader, rest, strict=True))


def test_a_worker_brings_the_same(cubes):
    loaded = []
    for workers in (0, 1):
        sampler = EpochSampler(5, 3)
        sampler.start(1, 0)
        loaded.append(list(training_loader(cubes, sampler, workers=workers)))
    for here, there in zip(*loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_validation_returns_every_subject_in_its_own_orientation(cubes, paths):
    whole = load_cubes(paths)
    for (images, truth), *expected in zip(validation_loader(cubes), whole.images, whole.truth, strict=True):
        assert torch.equal(images[0], expected[0]) and torch.equal(truth[0], expected[1])
    assert torch.equal(SYMMETRIES[UNMOVED].apply(whole.images), whole.images)
