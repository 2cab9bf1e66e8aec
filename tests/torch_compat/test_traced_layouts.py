"""The order of a tensor's dimensions in memory determines its strides for any shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmswap.torch_compat.traced_layouts import dimension_order, strides_of


@given(st.lists(st.integers(2, 4), max_size=4), st.randoms(use_true_random=False))
def test_strides_of_dense_tensors_follow_from_the_order(shape, random):
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.empty(shape).permute(order)
    assert strides_of(dimension_order(tensor), tensor.shape) == tensor.stride()
    larger = torch.empty([size + 3 for size in shape]).permute(order)
    assert strides_of(dimension_order(tensor), larger.shape) == larger.stride()


def test_expanded_dimensions_stay_expanded():
    assert strides_of(dimension_order(torch.empty(5).expand(2, 3, 5)), (7, 8, 9)) == (0, 0, 1)


@pytest.mark.parametrize("tensor", [torch.empty(4, 6)[:, :5], torch.empty(8)[::2]])
def test_tensors_with_gaps_have_no_order(tensor):
    assert dimension_order(tensor) is None
