"""Byte counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import OptionError
from lmswap.ir.bytesize import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(7, 7), ("7", 7), ("6GiB", 6 * 2**30), ("1.5 GB", 1_500_000_000), (" 300 mib ", 300 * 2**20), ("2kB", 2000)],
)
def test_numbers_and_units_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "6 giga", "-6GiB", "0", 0, -1, 1.5, True, None, "1e9", "6GiB6", "٣x"])
def test_anything_else_is_refused(text):
    with pytest.raises(OptionError, match="budget"):
        parse_bytes(text)


@given(st.integers(1, 2**60))
def test_what_is_written_is_read_back_to_three_digits(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.01)
