"""Networks: what their files keep and refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.distributed.prediction.network import PRESETS, Network
from lmswap.errors import OptionError
from tests.ir.damage import damaged
from tests.ir.strategies import networks


@given(networks())
def test_json_keeps_every_network(network: Network):
    assert Network.from_json(network.to_json()) == network


@pytest.mark.parametrize("name", PRESETS)
def test_a_network_with_a_name_can_be_written_down(name):
    assert Network.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_the_network_that_the_page_describes_can_be_read():
    page = (Path(__file__).parents[3] / "benchmarks" / "distributed" / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert Network.from_json(text).between_nodes.seconds(2**16) == 5e-5


@given(st.data(), networks())
def test_a_damaged_file_is_refused_or_still_a_network(data, network):
    try:
        found = Network.from_json(data.draw(damaged(network.to_json())))
    except OptionError:
        return
    assert Network.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm": "gossip"}, "unknown all-reduce algorithm 'gossip'; known are ring, hierarchical"),
        ({"ranks_per_host_link": 0}, "ranks_per_host_link must be 1 to ranks_per_node, got 0 of 4"),
        ({"ranks_per_host_link": 5}, "got 5 of 4"),
        ({"busy_factor": 0.0}, "busy_factor must be more than 0 and at most 1, got 0.0"),
        ({"compute_factor": 1.5}, "compute_factor must be more than 0 and at most 1, got 1.5"),
    ],
)
def test_an_impossible_network_is_refused(changes, sentence):
    with pytest.raises(OptionError, match=sentence):
        replace(PRESETS["ac922"], **changes)
