"""`lmswap links`: its text, its JSON, and that it really measures."""

import json

import pytest

from lmswap.cli import entry
from lmswap.cli.links import emulating_tier, links_text
from lmswap.hardware.link import HostLink
from lmswap.hardware.link_peak import PeakRate
from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.machine import Link, Rate
from tests.cli.terminal_width import too_wide

PCIE5 = Link(Rate(((2**20, 1e-4), (2**26, 2**26 / 50e9))), Rate.constant(52e9), 0.9, 0.8, 0.95)
SLOW = Link(Rate.constant(1e9), Rate.constant(2e9))
SPARE = Link(Rate.constant(1.5e12), Rate.constant(1.4e12), 0.5, compute_factor=0.7)


def rows(text):
    return {line.split("  ")[0]: line.split()[-7:] for line in text.splitlines()}


def test_links_of_a_gpu_are_shown_with_those_that_they_can_emulate():
    peaks = (PeakRate(53.5e9, 45e9, 50e9, 0.97), PeakRate(55.1e9, 44e9, 51e9, 0.96))
    link = HostLink("pcie", "PCIe gen5 x16", 63e9)
    text = links_text("cuda:0 (GPU)", link, peaks, {"host": PCIE5, "compressed": SLOW, "device": SPARE}, {})
    assert not too_wide(text)
    assert "host link: PCIe gen5 x16" in text
    found = rows(text)
    assert found["out to the host"] == ["53.50", "63.00", "85", "%", "45.00", "50.00", "97", "%"][-7:]
    assert found["out to the host tier"][-3:] == [
        "10.49",
        "50.00",
        "–",
    ]  # none at a size that only others were measured at
    assert found["host tier"] == ["tier", "90", "%", "80", "%", "95", "%"]
    assert 'link="pcie3", tier="host"' in text
    assert 'link="pcie5", tier="device"' in text
    assert 'link="c2c", tier="device"' in text
    assert '- tier="host": up to 50.00 GB/s out and 52.00 GB/s in, such as link="25.00GB/s".' in text


def test_unmeasurable_links_are_reported():
    text = links_text("cuda:0", HostLink("unknown", "unknown: no NVML"), None, {}, {"disk tier": "no directory"})
    assert "disk tier: NOT AVAILABLE: no directory" in text
    assert "host link: unknown: no NVML" in text


def test_a_link_is_emulated_by_the_first_tier_fast_enough_both_ways():
    found = {"host": PCIE5, "device": SPARE}
    assert emulating_tier(EmulatedLink(49e9, 51e9), found) == "host"
    assert emulating_tier(EmulatedLink(49e9, 53e9), found) == "device"
    assert emulating_tier(EmulatedLink(51e9, 1e9), found) == "device"
    assert emulating_tier(EmulatedLink(1e13, 1e9), found) is None


@pytest.mark.slow
def test_this_machines_tiers_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert entry.main(["links", "--json", "--disk-directory", str(tmp_path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["host_link"]["kind"], data["peak"]) == ("lmswap.links/2", "none", None)
    assert [*data["tiers"]] == ["disk", "compressed"]
    for measured in data["tiers"].values():
        assert measured["out_rate"]["points"][-1][1] > 0
        assert 0 < measured["busy_factor"] <= 1
        assert 0 < measured["compute_factor"] <= 1
    assert data["presets"]["c2c"] == {
        "out_bytes_per_second": 450e9, "in_bytes_per_second": 450e9, "shared_file": None, "tier": None
    }  # fmt: skip


def test_links_fails_without_a_tier(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("lmswap.hardware.survey.tiers_to_try", lambda device: ("disk",))
    assert entry.main(["links", "--disk-directory", str(tmp_path / "missing")]) == 2
    assert "disk tier: NOT AVAILABLE: no directory for swap files" in capsys.readouterr().out
