import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.unet3d.loss import weighted_dice_loss
from tests.cases import cases

SHAPE = (2, 3, 4, 5, 6)


def reference(probability, truth):
    p, y = probability.double().numpy(), truth.double().numpy()
    terms = []
    for n, label in np.ndindex(SHAPE[:2]):
        overlap, total = (y[n, label] * p[n, label]).sum(), y[n, label].sum() + p[n, label].sum()
        terms.append(2 * (overlap + 0.5e-5) / (total + 1e-5))
    return -np.mean(terms)


@cases(30)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_is_minus_the_mean_dice_over_batch_and_labels(seed, share):
    generator = torch.Generator().manual_seed(seed)
    probability = torch.rand(SHAPE, generator=generator)
    truth = (torch.rand(SHAPE, generator=generator) < share).float()
    assert weighted_dice_loss(probability, truth).item() == pytest.approx(reference(probability, truth), rel=1e-5)


def test_loss_is_minus_one_where_prediction_and_truth_agree():
    truth = torch.zeros(SHAPE)
    truth[:, 0, 1:3] = 1
    assert weighted_dice_loss(truth, truth).item() == pytest.approx(-1)


def test_a_rare_label_weighs_as_much_as_a_common_one():
    truth = torch.zeros(1, 2, 4, 4, 4)
    truth[0, 0] = 1
    truth[0, 1, 0, 0, 0] = 1
    without_common, without_rare = truth.clone(), truth.clone()
    without_common[0, 0] = 0
    without_rare[0, 1] = 0
    common, rare = weighted_dice_loss(without_common, truth), weighted_dice_loss(without_rare, truth)
    assert common.item() == pytest.approx(rare.item(), abs=1e-4)


def test_sums_bfloat16_probabilities_exactly_enough():
    probability = torch.full((1, 1, 64, 64, 64), 0.5, dtype=torch.bfloat16)  # bfloat16 cannot count past 256
    truth = torch.ones(1, 1, 64, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert weighted_dice_loss(probability, truth).item() == pytest.approx(-2 / 3, rel=1e-6)
