"""The properties of tests/test_enable.py on a CUDA device; skipped where there is none."""

import json

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError
from lmswap.hardware import measure
from lmswap.ir.machine import Host, Link, Machine, Rate, Tier
from lmswap.runtime.step_record import StepRecord
from tests.models import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]
SMALL = 4096
ALONE = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no other GPU to swap to")
TIERS = ("host", "disk", "compressed", "peer")


def on(tier, *values, is_slow):
    """A test's parameters, ``tier`` the last of them."""
    return pytest.param(*values, tier, marks=[ALONE] * (tier == "peer") + [pytest.mark.slow] * is_slow)


def train(case: Case, policy: str, *, tier: str = "host", budget: int | str = "auto", num_steps: int = 3, **options):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make().cuda()
    lmswap.enable(model, budget=budget, policy=policy, tier=tier, min_swap_bytes=SMALL, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    results = []
    for _ in range(num_steps):
        output = model(case.batch().cuda())
        tensors = output if isinstance(output, tuple) else (output,)
        loss = sum((tensor.float() ** 2).mean() for tensor in tensors)
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        del output, tensors, loss
    report = lmswap.report(model)
    lmswap.disable(model)
    return results, report


# Others take minutes on an emulated GPU, where the demo trains the U-Net.
QUICK = {("shared_views", tier) for tier in TIERS if tier != "peer"}  # of which there are tests of its own


@pytest.mark.parametrize(
    ("name", "tier"),
    [on(tier, name, is_slow=(name, tier) not in QUICK) for name in CASES for tier in TIERS],
)
@pytest.mark.filterwarnings("default")  # some CUDA kernels have no deterministic form, and say so
def test_every_policy_gives_the_same_bits(name, tier):
    expected, _ = train(CASES[name], "none")
    again, _ = train(CASES[name], "none")
    if not all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)):
        pytest.skip("this model's kernels do not repeat their own bits on this device")
    for policy in ("swap_all", "tflms"):
        actual, report = train(CASES[name], policy, tier=tier)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        if policy == "swap_all":
            assert report.swapped_out_bytes > 0
            assert report.tier_used_bytes == 0


class HostIndices(torch.nn.Module):
    """Picks by indices that are made on the host, and saved there for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        indices = torch.arange(4096, device="cpu").flip(0)
        return torch.tanh(self.layer(x)).flatten()[indices].exp()


def test_tensors_that_a_model_makes_on_the_host_stay_there():
    case = Case(HostIndices, lambda: torch.randn(64, 64))
    expected, _ = train(case, "none")
    actual, report = train(case, "swap_all")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert report.swapped_out_bytes > 0


@pytest.mark.parametrize("tier", [on(tier, is_slow=tier != "disk") for tier in TIERS])
@pytest.mark.filterwarnings("default")
def test_verified_and_wiped_steps_are_the_same_steps(tier):
    expected, _ = train(CASES["encoder"], "none")
    actual, report = train(CASES["encoder"], "swap_all", tier=tier, verify=True, wipe=True)
    if not report.verified.unrepeatable:
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert report.verified.num_transfers > 0
    assert report.verified.num_gradients > 0
    assert report.verified.num_differences == 0


def test_an_allocator_without_statistics_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    with pytest.raises(OptionError, match=r"change_current_allocator.*train with torch's own"):
        lmswap.enable(torch.nn.Linear(4, 4).cuda())


def test_an_allocator_without_readable_settings_serves_without_an_arena(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)
    _, report = train(CASES["encoder"], "swap_all")
    assert report.swapped_out_bytes > 0


def test_launch_overhead_is_remeasured_after_first_runs(monkeypatch, tmp_path):
    link, host = Link(Rate.constant(2e10), Rate.constant(2e10)), Host(1e-5, 1e-5)
    machine = Machine("of this test", 2**34, 50e9, 10e9, 1e-6, (Tier("host", 2**34, link),), host)
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))
    measure._cache_file(torch.device("cuda:0"), "host", "").write(json.loads(machine.to_json()))
    taken, num_asked = [50.0], []  # seconds of a segment that the device waited for

    def host_seconds(record):
        num_asked.append(record.step.number)
        return tuple(taken[0] for _ in record.segments)

    monkeypatch.setattr(StepRecord, "host_seconds", host_seconds)
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
    lmswap.enable(model, budget="1GiB", compiler="fx")
    predicted = []
    for number in range(10):
        if number == 4:  # what the third took is learned when the fourth begins
            taken[0] = 1e-3
        model(torch.ones(64, 64, device="cuda")).square().mean().backward()
        model.zero_grad()
        predicted.append(lmswap.api._sessions[model].current_step().plan.predicted_seconds)
    assert predicted[3] > 90
    assert predicted[-1] < 50
    assert num_asked[-1] < 8  # later steps are not waited for
    lmswap.disable(model)
