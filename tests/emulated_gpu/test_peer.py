"""Spare memory of another GPU holds swapped tensors; all are restored, and missing memory is reported in time."""

import json
import re

import pytest
import torch

import lmswap
from lmswap.errors import OptionError, TierError
from lmswap.hardware import measure
from lmswap.hardware.measure import describe_machine
from lmswap.hardware.probe import MEASURED_BYTES, round_trip_seconds
from lmswap.runtime import _C
from tests.emulated_gpu.programs import run
from tests.models import CASES

CASE = CASES["shared_views"]
GIB = 2**30


def not_torchs_bytes(device):
    free, total = _C.device_bytes(device)
    return total - free - torch.cuda.memory_reserved(device)


@pytest.fixture(autouse=True)
def nothing_stays_on_either_gpu(emulated_gpu):
    """When a test has ended its tiers have given everything back, without waiting for the end of the process."""
    total, before = emulated_gpu.capacity_bytes(1), [not_torchs_bytes(device) for device in range(2)]
    yield
    emulated_gpu.set_capacity(total, device=1)
    assert [not_torchs_bytes(device) for device in range(2)] == before


def leave_free(emulated_gpu, nbytes):
    """Lets each other GPU have no more than so much to spare."""
    for device in range(1, torch.cuda.device_count()):
        free, total = _C.device_bytes(device)
        emulated_gpu.set_capacity(total - free + nbytes, device=device)


def enable(device, tier="peer", policy="swap_all", **options):
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(CASE.make().to(device), "1GiB", policy=policy, tier=tier, min_swap_bytes=4096, **options)


def step(model, device, number=0):
    torch.manual_seed(number)
    loss = sum(output.square().mean() for output in model(CASE.batch().to(device)))
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def steps(device, **options):
    model = enable(device, **options)
    results = [result for number in range(3) for result in step(model, device, number)]
    report = lmswap.report(model)
    lmswap.disable(model)
    return results, report


def are_equal(results, expected):
    return all(torch.equal(a, b.to(a.device)) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("tier", ["peer", "peer:1"])
@pytest.mark.parametrize(
    ("have_access", "way"), [(True, "directly, by"), (False, "by way of the host: the two have no peer access")]
)
def test_results_are_the_same_with_and_without_peer_access(tier, have_access, way, emulated_gpu):
    remembered = describe_machine(torch.device("cuda:0"), "peer").to_json()
    emulated_gpu.configure_peers(have_access=have_access)
    measure._cache_file(torch.device("cuda:0"), "peer", "cuda:1").write(json.loads(remembered))
    expected, _ = steps("cuda:0", policy="none", tier="host")
    results, report = steps("cuda:0", tier=tier)
    assert are_equal(results, expected)
    assert (report.tier, report.swapped_out_bytes > 0) == ("peer", True)
    (note,) = [note for note in report.notes if note.startswith("tier: ")]
    peer = "1" if tier == "peer:1" else "[1-3]"  # the fastest of them, all alike here
    assert re.search(rf"swapped tensors go to cuda:{peer} \(Emulated GPU\), {way}", note)


@pytest.mark.slow
def test_two_models_on_two_gpus_swap_into_each_other(emulated_gpu):
    devices = ("cuda:0", "cuda:1")
    expected, _ = steps("cuda:0", policy="none", tier="host")
    emulated_gpu.configure(jitter_seconds=0.001)
    models = [enable(device) for device in devices]
    results = [[], []]
    for number in range(3):
        for device, model, found in zip(devices, models, results, strict=True):
            found.extend(step(model, device, number))
    for model, found in zip(models, results, strict=True):
        assert are_equal(found, expected)
        assert lmswap.report(model).swapped_out_bytes > 0
        lmswap.disable(model)


def test_peer_copies_take_the_time_of_their_links(emulated_gpu):
    nbytes, device = 2**26, torch.device("cuda:0")
    emulated_gpu.configure(out_rate=1e9, in_rate=1e9)
    emulated_gpu.configure_peers(rate=2e9)
    assert round_trip_seconds(device, "peer", "cuda:1") >= 2 * nbytes / 2e9
    emulated_gpu.configure_peers(have_access=False, rate=2e9)
    assert round_trip_seconds(device, "peer", "cuda:1") >= 4 * nbytes / 1e9


@pytest.mark.parametrize("tier", ["peer", "peer:1"])
def test_a_peer_that_is_full_is_refused_with_its_numbers_before_training(tier, emulated_gpu):
    leave_free(emulated_gpu, MEASURED_BYTES - 2**21)
    with pytest.raises(TierError, match=r"has 192\.00 MiB free: cuda:1 has 190\.00 MiB.*tier='host'"):
        enable("cuda:0", tier=tier)
    leave_free(emulated_gpu, 2 * GIB)
    with pytest.raises(TierError, match=r"has 3\.00 GiB free: cuda:1 has 2\.00 GiB"):
        enable("cuda:0", tier=tier, host_budget="3GiB")


def test_a_peer_that_has_filled_up_is_reported_before_the_first_step(emulated_gpu):
    model = enable("cuda:0")
    leave_free(emulated_gpu, 0)
    with pytest.raises(TierError, match=r"peer tier: .* of the other GPU's memory .*0\.0 MiB .*free"):
        step(model, "cuda:0")
    assert lmswap.report(model).steps == 0
    lmswap.disable(model)


@pytest.mark.parametrize(
    ("tier", "device", "reason"),
    [
        ("peer:0", "cuda:0", "another GPU than cuda:0: cuda:1.*, not cuda:0"),
        ("peer:7", "cuda:0", "another GPU than cuda:0: cuda:1.*, not cuda:7"),
        ("peer:one", "cuda:0", "'peer:one' names no GPU"),
        ("peer:", "cuda:0", "'peer:' names no GPU"),
        ("peers", "cuda:0", "unknown tier 'peers'"),
        ("peer", "cpu", "not on the CPU"),
        ("peer:1", "cpu", "not on the CPU"),
    ],
)
def test_invalid_peers_are_refused(tier, device, reason):
    with pytest.raises(OptionError, match=reason):
        enable(device, tier=tier)


def test_a_gpu_that_is_alone_has_no_peer():
    program = """
import lmswap
try:
    lmswap.enable(torch.nn.Linear(2, 2).cuda(), "1GiB", tier="peer")
except lmswap.errors.OptionError as error:
    assert "cuda:0 is the only one that is visible" in str(error) and "CUDA_VISIBLE_DEVICES" in str(error)
else:
    raise AssertionError("a GPU was its own peer")
"""
    run(program, DEVICES=1)
