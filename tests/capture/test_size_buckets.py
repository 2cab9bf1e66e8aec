"""Buckets cover all sizes, each within a quarter of its largest one."""

from hypothesis import given
from hypothesis import strategies as st

from lmswap.capture.size_buckets import bucket_edge


@given(st.integers(-5, 10**9))
def test_the_edge_of_a_bucket_is_at_most_a_quarter_above_its_sizes(size):
    edge = bucket_edge(size)
    assert size <= edge <= max(size, 1.25 * size)
    assert bucket_edge(edge) == edge


def test_there_are_four_buckets_from_one_power_of_two_to_the_next():
    assert sorted({bucket_edge(size) for size in range(257, 2049)}) == [
        *range(320, 513, 64),
        *range(640, 1025, 128),
        *range(1280, 2049, 256),
    ]
