import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.unet3d.augment import SYMMETRIES, UNMOVED

CUBE = torch.arange(27.0).reshape(3, 3, 3)
POSITIONS = [symmetry.apply(CUBE) for symmetry in SYMMETRIES]
symmetries = st.integers(0, len(SYMMETRIES) - 1)


def index_of(position):
    return next(index for index, known in enumerate(POSITIONS) if torch.equal(known, position))


def test_all_48_orientations_of_the_cube_differ():
    assert len({tuple(position.flatten().tolist()) for position in POSITIONS}) == len(SYMMETRIES) == 48
    assert torch.equal(POSITIONS[UNMOVED], CUBE)


@given(symmetries, symmetries)
def test_two_after_one_another_are_one_of_the_48(first, second):
    index_of(SYMMETRIES[second].apply(POSITIONS[first]))


def test_each_can_be_undone():
    for position in POSITIONS:
        assert any(torch.equal(symmetry.apply(position), CUBE) for symmetry in SYMMETRIES)


def test_neighbours_stay_neighbours():
    for position in POSITIONS:
        places = [(position == value).nonzero()[0] for value in range(27)]
        for value in range(27):
            for step in (1, 3, 9):
                if value // step % 3 < 2:
                    assert (places[value] - places[value + step]).abs().sum() == 1


@given(symmetries)
def test_truth_moves_with_the_image(index):
    images = torch.randn(4, 5, 5, 5, generator=torch.Generator().manual_seed(0))
    truth = (images[:3] > 0.5).float()
    moved_images, moved_truth = (SYMMETRIES[index].apply(tensor) for tensor in (images, truth))
    assert torch.equal(moved_truth, (moved_images[:3] > 0.5).float())
    assert moved_images.shape == images.shape and moved_images.is_contiguous()
