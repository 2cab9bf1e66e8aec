"""`enable(..., link=...)`: a training step behind a slower link than the machine has."""

import json

import pytest
import torch

import lmswap
from lmswap.errors import OptionError
from lmswap.ir.machine import Link, Machine, Rate, Tier
from lmswap.options import Options
from lmswap.session.engine_setup import as_requested

MIB = 2**20
SLOW = "40MB/s out, 50MB/s in"


class Wide(torch.nn.Module):
    """Saves 16 MiB for the backward pass, 4 MiB at a time."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        for _ in range(4):
            x = torch.sin(x * self.scale)
        return x.sum()


def train(**options):
    torch.manual_seed(0)
    model = lmswap.enable(Wide(), policy="swap_all", budget="2GiB", **options)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(MIB))
        loss.backward()
        losses.append(loss.detach())
    report = lmswap.report(model)
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    lmswap.disable(model)
    return report, losses + grads


@pytest.fixture(scope="module")
def both():
    return train(), train(link=SLOW)


def test_bits_are_the_same_behind_a_slow_link(both):
    (_, expected), (_, found) = both
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_no_copy_is_faster_than_the_emulated_link_which_is_reported(both):
    (plain, _), (slow, _) = both
    assert plain.emulated_link is None
    assert "EMULATED" not in str(plain)
    assert slow.out_bytes_per_second <= 40e6 * (1 + 1e-6)
    assert slow.in_bytes_per_second <= 50e6 * (1 + 1e-6)
    assert "Link EMULATED: 0.04 GB/s out, 0.05 GB/s in; achieved: " in str(slow)
    data = json.loads(slow.to_json())
    assert data["emulated_link"] == {"out_bytes_per_second": 40e6, "in_bytes_per_second": 50e6, "shared_file": None}
    assert data["out_bytes_per_second"] == slow.out_bytes_per_second
    assert json.loads(plain.to_json())["emulated_link"] is None


def test_the_plan_is_made_for_the_emulated_link(both):
    (_, _), (slow, _) = both
    copies = [span for span in slow.predicted.spans if span.lane in ("out", "in")]
    assert copies
    for span in copies:
        assert span.seconds >= span.nbytes / (40e6 if span.lane == "out" else 50e6) * 0.999


def test_a_remembered_plan_of_another_link_is_not_used():
    origins = [train(link=link)[0].plan_origin for link in ("200MB/s", "200MB/s", "300MB/s")]
    assert ["cache" in origin for origin in origins] == [False, True, False]


def test_a_link_above_the_real_one_is_refused_with_both_numbers():
    model = Wide()
    with pytest.raises(OptionError, match=r"450 GB/s out cannot be emulated over one that was measured at .* GB/s"):
        lmswap.enable(model, budget="2GiB", link="c2c")
    assert lmswap.enable(model, budget="2GiB") is model
    lmswap.disable(model)


def test_the_device_tier_is_for_emulation_on_a_gpu_only():
    with pytest.raises(OptionError, match="it needs link"):
        Options.parse("1GiB", tier="device")
    with pytest.raises(OptionError, match="a budget in bytes"):
        Options.parse("auto", tier="device", link="nvlink2")
    with pytest.raises(OptionError, match="spare memory of a GPU"):
        lmswap.enable(Wide(), budget="1GiB", tier="device", link="nvlink2")


def test_the_device_tier_has_what_the_budget_leaves_free():
    fast = Link(Rate.constant(1e12), Rate.constant(1e12))
    machine = Machine("gpu", 2**34, 1.0, 1.0, 0.0, (Tier("device", 10 * 2**30, fast),))

    def capacity_bytes(budget, **limits):
        options = Options.parse(budget, tier="device", link="nvlink2", **limits)
        return as_requested(machine, "device", options).tier("device").capacity_bytes

    assert capacity_bytes("4GiB") == 6 * 2**30
    assert capacity_bytes("4GiB", host_budget="1GiB") == 2**30
    with pytest.raises(OptionError, match=r"nothing to spare: 10.00 GiB of the device are free"):
        capacity_bytes("10GiB")


def test_invalid_links_are_refused():
    for link in (11.7, True, ("1GB/s", "1GB/s")):
        with pytest.raises(OptionError, match="link must be a string"):
            Options.parse(link=link)


def test_models_that_name_one_file_share_one_link(tmp_path):
    link = lmswap.EmulatedLink(40e6, 50e6, shared_file=str(tmp_path / "bus"))
    report, _ = train(link=link)
    assert (tmp_path / "bus").stat().st_mode & 0o777 == 0o600
    assert "shared by" in str(report)
    with pytest.raises(OptionError, match="GB/s"):
        train(link=lmswap.EmulatedLink(41e6, 50e6, shared_file=str(tmp_path / "bus")))


def test_pacing_leaves_room_for_both_ways_at_once():
    measured = Link(Rate.constant(1e9), Rate.constant(2e9), both_factor=0.5)
    assert lmswap.EmulatedLink(5e8, 5e8).over(measured).both_factor == pytest.approx(1.0)
    assert lmswap.EmulatedLink(8e8, 5e8).over(measured).both_factor == pytest.approx(0.625)
    beside = Link(Rate.constant(1e9), Rate.constant(2e9), busy_factor=0.5)
    assert lmswap.EmulatedLink(8e8, 5e8).over(beside).busy_factor == pytest.approx(0.625)
    beside = Link(Rate.constant(1e9), Rate.constant(2e9), compute_factor=0.5)
    assert lmswap.EmulatedLink(8e8, 5e8).over(beside).compute_factor == pytest.approx(0.6)
