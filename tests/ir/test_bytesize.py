"""Byte counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import OptionError
from lmswap.ir.bytesize import AUTO, SHARE, format_bytes, parse_budget, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(7, 7), ("7", 7), ("6GiB", 6 * 2**30), ("1.5 GB", 1_500_000_000), (" 300 mib ", 300 * 2**20), ("2kB", 2000)],
)
def test_numbers_and_units_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "6 giga", "-6GiB", "0", 0, -1, 1.5, True, None, "1e9", "6GiB6", "٣x"])
def test_other_byte_counts_are_refused(text):
    with pytest.raises(OptionError, match="budget"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["9" * 400, "9" * 5000 + "GiB", "1048577 TiB", 10**400, 10**5000, -(10**5000), 1e300], ids=type
)
def test_byte_counts_beyond_any_machine_are_refused(text):
    with pytest.raises(OptionError, match=r"host_budget is beyond 1048576.00 TiB, more than any machine has"):
        parse_bytes(text, what="host_budget")


@pytest.mark.parametrize("text", ["9" * 400 + "%", "1e300%", "150%", "100.1 %", "inf%", "nan%", "0%", "-5%"])
def test_a_share_is_above_0_and_no_more_than_all(text):
    with pytest.raises(
        OptionError, match=r"is not a share of the peak; write .* and up to 100%, which has room for all"
    ):
        parse_share(text, of="the peak")
    assert parse_share("100 %", of="the peak") == 1


@pytest.mark.parametrize("text", ["6G", "6Gi", " 6 g "])
def test_an_incomplete_unit_is_refused_with_both_possible_ones(text):
    with pytest.raises(OptionError, match='is not a byte count; write "6GB" or "6GiB"'):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["AUTO", None, "1e9"])
def test_errors_name_exactly_the_allowed_alternatives(text):
    with pytest.raises(OptionError, match='"6GiB", or "auto", or a share, "50%"'):
        parse_budget(text, also=(AUTO, SHARE))
    with pytest.raises(OptionError, match="host_budget") as refusal:
        parse_budget(text, what="host_budget")
    assert "auto" not in str(refusal.value) and "%" not in str(refusal.value)


def test_large_counts_are_written_in_a_large_unit():
    assert [format_bytes(nbytes) for nbytes in (2**40 - 2**30, 1000 * 2**40)] == ["1023.00 GiB", "1000.00 TiB"]


@given(st.integers(1, 2**60))
def test_written_sizes_are_read_back_to_three_digits(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.01)
