import csv
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from benchmarks.unet3d.scores import Score, dice, score_regions, subject_means, write_scores

volumes = arrays.arrays(np.uint8, (2, 2, 3), elements=st.sampled_from([0, 1, 2, 4]))


def test_dice_of_a_hand_example():
    truth, prediction = np.array([1, 1, 1, 0, 0], bool), np.array([1, 1, 0, 1, 0], bool)
    assert dice(truth, prediction) == 2 * 2 / (3 + 3)
    assert dice(truth, ~truth) == 0
    assert dice(truth, np.zeros(5, bool)) == 0
    assert math.isnan(dice(np.zeros(5, bool), np.zeros(5, bool)))


def test_regions_are_sets_of_labels():
    truth, prediction = np.array([1, 2, 4, 0, 0]), np.array([4, 2, 4, 1, 0])
    assert score_regions(truth, prediction) == {
        "whole_tumour": 2 * 3 / (3 + 4),
        "tumour_core": 2 * 2 / (2 + 3),
        "enhancing_tumour": 2 * 1 / (1 + 2),
    }


@given(volumes, volumes)
def test_dice_is_symmetric_within_0_and_1_and_1_for_equals(one, other):
    for region, value in score_regions(one, other).items():
        mirrored, itself = score_regions(other, one)[region], score_regions(one, one)[region]
        assert math.isnan(value) == math.isnan(mirrored)
        assert math.isnan(value) or 0 <= value == mirrored <= 1
        assert math.isnan(itself) or itself == 1


def score(model, subject, value, size=64):
    return Score(model, size, 96, subject, value, value, math.nan)


def test_a_subject_is_averaged_over_the_models_of_a_size_without_nan():
    scores = [score("a", "s", 0.25), score("b", "s", 0.75), score("a", "t", math.nan), score("b", "t", 0.5),
              score("c", "s", 0.9, size=96)]  # fmt: skip
    assert subject_means(scores, 64, "whole_tumour") == {"s": 0.5, "t": 0.5}
    assert subject_means(scores, 96, "whole_tumour") == {"s": 0.9}
    assert subject_means(scores, 64, "enhancing_tumour") == {}


def test_the_csv_has_a_row_for_each_model_and_subject(tmp_path):
    write_scores(tmp_path / "scores.csv", [score("a", "s", 1 / 3), score("b", "s", 0.5)])
    with (tmp_path / "scores.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["model"], first["subject"], first["size"], first["scored_size"]) == ("a", "s", "64", "96")
    assert float(first["whole_tumour"]) == 1 / 3 and first["enhancing_tumour"] == ""
    assert second["model"] == "b"


@pytest.mark.parametrize("region", ["whole_tumour", "tumour_core"])
def test_a_score_is_found_by_region(region):
    assert score("a", "s", 0.5).of(region) == 0.5
