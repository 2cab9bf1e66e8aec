import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import OptionError
from lmswap.ir.emulation import PRESETS, EmulatedLink
from lmswap.ir.machine import Link, Rate

rates = st.integers(1, 500_000).map(lambda mega: mega * 10**6)


@given(rates, rates)
def test_rates_are_read_as_they_are_written(out, into):
    assert EmulatedLink.parse(f"{out // 10**6} MB/s out, {into // 10**6}MB/s in") == EmulatedLink(out, into)
    turned = EmulatedLink.parse(f"{into / 1e9}GB/s in,{out / 1e9}GB/s out")
    assert (turned.out_bytes_per_second, turned.in_bytes_per_second) == pytest.approx((out, into))
    assert EmulatedLink.parse(f" {out // 10**6}MB/s ") == EmulatedLink(out, out)


@pytest.mark.parametrize("name", PRESETS)
def test_known_links_go_by_name(name):
    assert EmulatedLink.parse(name) is PRESETS[name]
    assert not PRESETS[name].shared_file


@pytest.mark.parametrize(
    "text",
    ["", "pcie9", "11.7", "11.7GB", "GB/s", "1GB/s out", "1GB/s out, 2GB/s out", "1GB/s, 2GB/s", "1GB/s up", "1GB/s,"],
)
def test_text_that_is_not_a_rate_is_rejected(text):
    with pytest.raises(OptionError):
        EmulatedLink.parse(text)


@pytest.mark.parametrize(
    "text", ["1GB/s out, 2GB/s in, 3GB/s in", "1GB/s out in", "-1GB/s", "0GB/s", "1B/s", "1GB/s/s", "nanGB/s"]
)
def test_text_that_is_almost_a_rate_is_rejected(text):
    with pytest.raises(OptionError):
        EmulatedLink.parse(text)


@pytest.mark.parametrize("rate", [0, -1e9, math.nan, math.inf, "1GB/s", True, None])
def test_a_rate_is_a_number_of_bytes(rate):
    with pytest.raises(OptionError, match=re.escape(repr(rate))):
        EmulatedLink(1e9, rate)


@given(st.integers(1, 2**30), st.floats(1e6, 9.9e8), st.floats(0, 1e-2))
def test_a_copy_takes_the_longer_of_the_link_and_the_pace(nbytes, asked, latency):
    measured = Rate(((2**20, latency + 2**20 / 1e9), (2**30, latency + 2**30 / 1e9)))
    if asked > measured.bytes_per_second:
        return
    paced = EmulatedLink(asked, asked).over(Link(measured, measured)).out_rate
    longest = max(measured.seconds(nbytes), nbytes / asked)
    assert paced.seconds(nbytes) >= longest * 0.999
    assert paced.seconds(nbytes) <= max(longest, measured.seconds(2**20), 2**20 / asked) * 1.5


@pytest.mark.parametrize("rate", [10**400, 10**5000, 1e300], ids=type)
def test_a_rate_beyond_all_links_is_refused_however_long_the_number_is(rate):
    for rates in ((rate, 1e9), (1e9, rate)):
        with pytest.raises(OptionError, match=r"at most 1.15e\+18 bytes per second"):
            EmulatedLink(*rates)
    with pytest.raises(OptionError, match="link is beyond"):
        EmulatedLink.parse("9" * 400 + "GB/s")


@pytest.mark.parametrize("path", ["", "bus\0", "caf\udce9", 5])
def test_a_shared_file_has_a_path_that_a_file_can_have(path):
    with pytest.raises(OptionError, match="shared_file must be a path as a string"):
        EmulatedLink(1e9, 1e9, shared_file=path)
