import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.split import draw_split, keep_split

NAMES = [f"case_{number}" for number in range(10)]


@given(st.sets(st.text(max_size=3), min_size=2), st.integers(0, 9))
def test_every_subject_is_in_one_part(names, seed):
    split = draw_split(names, seed)
    assert sorted((*split.training, *split.validation)) == sorted(names)
    assert len(split.training) == len(names) * 8 // 10 and split.validation


def test_brats_2017_splits_as_in_the_case_study():
    split = draw_split([str(number) for number in range(285)], 0)
    assert (len(split.training), len(split.validation)) == (228, 57)


def test_the_seed_and_not_the_order_of_names_decides():
    assert draw_split(NAMES, 3) == draw_split(NAMES[::-1], 3)
    assert len({draw_split(NAMES, seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("names", [[], ["one"]])
def test_refuses_too_few_subjects(names):
    with pytest.raises(DataError, match=f"{len(names)} subjects cannot train and validate"):
        draw_split(names, 0)


def test_a_stored_split_is_kept(tmp_path):
    path = tmp_path / "new" / "split.json"
    first = keep_split(path, NAMES, 0)
    assert keep_split(path, NAMES[::-1], 7) == first
    assert keep_split(tmp_path / "other.json", NAMES, 7) != first


def test_refuses_other_subjects_by_name(tmp_path):
    path = tmp_path / "split.json"
    keep_split(path, NAMES, 0)
    with pytest.raises(DataError, match=r"1 not in the split \(new\); 1 not in the data any more \(case_0\)"):
        keep_split(path, [*NAMES[1:], "new"], 0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"schema": "lmswap.unet3d.split/1", "training": ["a"], "validation": ["a"]}),
     json.dumps({"schema": "lmswap.unet3d.split/1", "training": ["a", "b"], "validation": []}),
     json.dumps({"schema": "another/1", "training": ["a"], "validation": ["b"]})],
)  # fmt: skip
def test_refuses_a_file_that_is_no_split(tmp_path, text):
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"split\.json (cannot be read as|is no) "):
        keep_split(path, ["a", "b"], 0)
