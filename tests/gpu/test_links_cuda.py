"""Links of a real GPU: measured, slowed down, and stood in for by spare device memory; skipped where there is none."""

import json

import pytest
import torch

import lmswap
from lmswap.cli import entry
from lmswap.errors import OptionError
from lmswap.hardware.measure import describe_machine
from lmswap.ir.emulation import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 2**20


class Wide(torch.nn.Module):
    """Saves 512 MiB for the backward pass, 64 MiB at a time."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        for _ in range(8):
            x = torch.sin(x * self.scale)
        return x.sum()


def train(**options):
    torch.manual_seed(0)
    model = lmswap.enable(Wide().cuda(), policy="swap_all", budget="2GiB", **options)
    results = []
    for _ in range(3):
        loss = model(torch.ones(16 * MIB, device="cuda"))
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    report = lmswap.report(model)
    lmswap.disable(model)
    return report, results


@pytest.mark.slow
def test_copies_are_held_to_the_link_and_the_bits_stay():
    plain, expected = train()
    for link in ("pcie3", "4GB/s"):
        report, found = train(link=link)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        asked = report.emulated_link
        assert report.out_bytes_per_second <= asked.out_bytes_per_second * 1.001
        assert report.in_bytes_per_second <= asked.in_bytes_per_second * 1.001
    assert plain.emulated_link is None


@pytest.mark.slow
def test_spare_device_memory_emulates_a_missing_link():
    _, expected = train()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    report, found = train(tier="device", link="nvlink2")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert report.swapped_out_bytes > 0
    assert report.tier == "device"
    assert report.emulated_link == PRESETS["nvlink2"]
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free_bytes - 64 * MIB  # the tier's memory is given back


def test_a_budget_that_leaves_nothing_to_spare_is_refused():
    _, total_bytes = torch.cuda.mem_get_info()
    with pytest.raises(OptionError, match="nothing to spare"):
        lmswap.enable(Wide().cuda(), budget=total_bytes, tier="device", link="nvlink2")


@pytest.fixture
def little_room():
    """What torch may still take: less than a measurement takes where it can choose."""
    torch.cuda.empty_cache()
    room_bytes = torch.cuda.memory_reserved() + 256 * MIB
    torch.cuda.set_per_process_memory_fraction(room_bytes / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_device_is_measured_where_a_model_fills_it(little_room, tmp_path, monkeypatch):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))  # nothing was measured before
    machine = describe_machine(torch.device("cuda", 0), "host")
    assert machine.bytes_per_second > 0 and machine.tier("host").link.out_rate.bytes_per_second > 0


@pytest.mark.real_gpu("an emulated one copies as fast as a CPU does, not as PCIe")
def test_the_host_link_is_measured_at_its_peak_and_by_the_engine(tmp_path, capsys):
    assert entry.main(["links", "--json", "--disk-directory", str(tmp_path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["failures"] == {} or set(data["failures"]) == {"disk tier"}
    for way in ("out", "in"):
        peak = data["peak"][way]
        assert peak["bytes_per_second"] > 1e9
        assert peak["both_bytes_per_second"] <= 1.1 * peak["bytes_per_second"]
        assert 0 <= peak["compute_factor"] <= 1
    assert set(data["tiers"]) >= {"host", "device"}
    assert data["presets"]["pcie3"]["tier"] is not None
