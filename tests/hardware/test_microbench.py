"""Microbenchmarks of a device take long enough to exceed launches, and no longer than needed."""

import pytest
import torch

from lmswap.hardware.microbench import smallest_long_enough


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        pytest.param({32: 1e-4, 64: 4e-3, 128: 1.0}, 64, id="the first that takes long"),
        pytest.param({32: 1.0, 64: 8.0}, 32, id="a slow device's first"),
        pytest.param({32: 1e-6, 64: 1e-5}, 64, id="a fast device's last"),
    ],
)
def test_the_first_size_that_takes_long_enough_is_chosen(seconds, chosen):
    tried = []

    def seconds_of(size):
        tried.append(size)
        return seconds[size]

    assert smallest_long_enough(tuple(seconds), seconds_of) == (chosen, seconds[chosen])
    assert tried[-1] == chosen


def test_sizes_that_do_not_fit_are_skipped():
    def seconds_of(size):
        if size > 64:
            raise torch.OutOfMemoryError
        return 1e-6

    assert smallest_long_enough((32, 64, 128), seconds_of) == (64, 1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        smallest_long_enough((128, 256), seconds_of)
