"""Machines: rates between and beyond their points, and what their files keep and refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.errors import OptionError
from lmswap.ir.machine import Link, Machine, Rate, Tier, slowest
from tests.ir.build import unit_machine
from tests.ir.damage import damaged
from tests.ir.strategies import machines, rates


@given(machines())
def test_json_keeps_every_machine(machine: Machine):
    assert Machine.from_json(machine.to_json()) == machine


@given(st.data(), machines())
def test_a_damaged_file_is_refused_or_still_a_machine(data, machine):
    text = data.draw(damaged(machine.to_json()))
    try:
        found = Machine.from_json(text)
    except OptionError:
        return
    assert Machine.from_json(found.to_json()) == found
    for tier in found.tiers:
        assert 0 <= tier.link.in_rate.seconds(10**6) < float("inf")


@given(rates(), st.integers(0, 2**42), st.integers(0, 2**42))
def test_more_bytes_never_take_less_time(rate: Rate, one: int, other: int):
    assert rate.seconds(min(one, other)) <= rate.seconds(max(one, other)) * (1 + 1e-12)


def test_a_rate_is_interpolated_between_its_points_and_linear_beyond():
    rate = Rate(((10, 2.0), (20, 3.0), (40, 3.0)))
    assert rate.seconds(0) == 0.0
    assert rate.seconds(1) == 2.0  # latency
    assert rate.seconds(10) == 2.0
    assert rate.seconds(15) == 2.5
    assert rate.seconds(30) == 3.0
    assert rate.seconds(80) == 6.0
    assert Rate.constant(4.0, 1.0).seconds(8) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((1, 0.0),),
        ((0, 1.0),),
        ((2, 1.0), (1, 2.0)),
        ((1, 2.0), (2, 1.0)),
        ((1, -1.0), (2, 1.0)),
        ((1, float("nan")), (2, 1.0)),
        ((1, 1.0), (2, float("inf"))),
    ],
)
def test_an_impossible_rate_is_refused(points):
    with pytest.raises(OptionError):
        Rate(points)


def test_the_slowest_link_is_chosen_at_each_size_that_all_have():
    one = Link(Rate(((1, 1.0), (10, 4.0), (100, 9.0))), Rate(((1, 2.0),)), 0.9, 0.5, 0.8)
    other = Link(Rate(((1, 2.0), (10, 3.0))), Rate(((1, 1.0),)), 0.6, 0.7, 1.0)
    expected = Link(Rate(((1, 2.0), (10, 4.0))), Rate(((1, 2.0),)), 0.6, 0.5, 0.8)
    assert slowest([one, other]) == slowest([other, one]) == expected
    assert slowest([one]) == one


def test_an_impossible_machine_is_refused():
    machine = unit_machine()
    link = machine.tiers[0].link
    for factor in (0.0, -1.0, 1.1, float("nan")):
        for name in ("both_factor", "busy_factor", "compute_factor"):
            with pytest.raises(OptionError, match=name):
                Link(link.out_rate, link.in_rate, **{name: factor})
    with pytest.raises(OptionError, match="'host'"):
        Tier("host", -1, link)
    for changes in ({"flops_per_second": 0.0}, {"bytes_per_second": float("nan")}, {"op_seconds": -1.0}):
        with pytest.raises(OptionError, match=next(iter(changes))):
            replace(machine, **changes)
    with pytest.raises(OptionError, match="device_bytes"):
        replace(machine, device_bytes=-1)


def test_an_unknown_tier_is_refused_with_those_that_exist():
    with pytest.raises(OptionError, match=r"has no tier 'tape'; it has \['host', 'disk'\]"):
        unit_machine().tier("tape")
