"""The bounded form of `make soak`: 200 steps with faults of every kind, and some of large tensors."""

import pytest

from benchmarks.soak import soak


@pytest.mark.slow
def test_200_steps_with_random_faults_keep_every_bit_and_leak_nothing():
    result = soak(200, seed=1, show=lambda line: None)
    assert result.survived + sum(result.lost_to.values()) == 200
    assert result.survived > 100
    assert len(result.lost_to) >= 6
    first, last = result.samples
    assert (first.open_files, first.threads) == (last.open_files, last.threads)
    assert result.grown_bytes(0) < 8 * 2**20


@pytest.mark.slow
def test_steps_of_large_tensors_keep_every_bit():
    result = soak(10, course="large", show=lambda line: None)
    assert result.survived == 10
    assert result.out_bytes > 50 * 2**20
