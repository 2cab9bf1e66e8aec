import resource

import pytest
import torch

from lmswap.errors import TierError, TransferError
from lmswap.hardware import probe as probes
from lmswap.hardware.microbench import convolution
from lmswap.hardware.probe import MEASURED_BYTES, LinkProbe, measure_link
from tests.hardware.fake_engine import FakeEngine
from tests.processes import limited

CPU = torch.device("cpu")
MIB = 2**20


def probe(capacity_bytes=MEASURED_BYTES, **engine):
    return LinkProbe(CPU, "disk", FakeEngine(**engine), capacity_bytes)


@pytest.mark.parametrize("room_bytes", [22 * MIB - 1, 3 * MIB])
def test_a_disk_with_little_room_is_measured_with_smaller_copies(tmp_path, room_bytes):
    with limited(resource.RLIMIT_FSIZE, room_bytes):  # no file there may be larger
        link = measure_link(CPU, "disk", str(tmp_path), room_bytes)
    assert link.out_rate.points[0][0] == 2**18
    assert link.out_rate.points[-1][0] <= room_bytes
    assert min(link.out_rate.bytes_per_second, link.in_rate.bytes_per_second) > 0
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_refused_with_the_bytes_that_measuring_takes(tmp_path):
    with pytest.raises(TierError, match=r"disk tier has room for 3.00 MiB; to measure its link takes 3.00 MiB"):
        measure_link(CPU, "disk", str(tmp_path), 3 * MIB - 1)


def test_smaller_copies_measure_the_same_shares():
    found = probe(8 * MIB, out_rate=2**30, in_rate=2**29, share=0.75)
    seconds = found.burst_bytes / 2**30, found.burst_bytes / 2**29
    assert 12 * found.burst_bytes <= 8 * MIB
    assert found.both_factor(*seconds) == pytest.approx(0.75)


@pytest.mark.parametrize("latency", [0.0, 2.0**-10])
def test_each_direction_gets_its_own_rate(latency):
    out_points, in_points = probe(out_rate=2**30, in_rate=2**28, share=1.0, latency=latency).alone()
    for points, rate in ((out_points, 2**30), (in_points, 2**28)):
        assert [nbytes for nbytes, _ in points][-1] == 64 * MIB or points[-1][1] * 8 > 0.5
        for nbytes, seconds in points:
            assert seconds == pytest.approx(latency + nbytes / rate)


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.3])
@pytest.mark.parametrize(("out_rate", "in_rate"), [(2**30, 2**30), (2**30, 2**29), (3e9, 1.1e9), (1e8, 2.5e9)])
def test_the_share_that_each_keeps_while_both_run_is_found(share, out_rate, in_rate):
    found = probe(out_rate=out_rate, in_rate=in_rate, share=share)
    assert found.both_factor(16 * MIB / out_rate, 16 * MIB / in_rate) == pytest.approx(share)


@pytest.mark.parametrize("beside", [(1.0, 1.0), (0.8, 1.0), (1.0, 0.7), (0.6, 0.9)])
@pytest.mark.parametrize(("out_rate", "in_rate"), [(2**30, 2**29), (1e8, 2.5e9)])
def test_mutual_slowdown_of_copies_and_compute_is_measured(beside, out_rate, in_rate):
    engine = FakeEngine(out_rate, in_rate, 1.0, beside=beside)
    found = LinkProbe(CPU, "disk", engine, MEASURED_BYTES).busy_factors(
        engine.compute, 16 * MIB / out_rate, 16 * MIB / in_rate
    )
    assert found == pytest.approx(beside)


def test_copies_that_never_end_are_an_error_and_not_a_hang(monkeypatch):
    stuck = probe(out_rate=2**30, in_rate=2**30, share=1.0)
    monkeypatch.setattr(FakeEngine, "take_records", lambda self: [])
    monkeypatch.setattr(probes, "_MAX_WAIT_SECONDS", 0.0)
    with pytest.raises(TransferError, match="1 of 1 copies did not end in 0 s"):
        stuck.alone()


def test_more_convolutions_take_more_time():
    compute = convolution(CPU)
    compute(1)
    assert 0 < compute(1) < compute(20)


def test_a_machine_without_noise_needs_few_copies_during_compute():
    engine = FakeEngine(2**30, 2**29, 1.0, beside=(0.8, 0.9))
    LinkProbe(CPU, "disk", engine, MEASURED_BYTES).busy_factors(engine.compute, 2.0**-6, 2.0**-5)
    assert engine.clock < 2.0


def test_a_noisy_machine_is_measured_until_others_load_is_outvoted():
    engine, num_beside = FakeEngine(2**30, 2**30, 1.0), []

    def compute(count):
        if count > 1 and not engine.is_idle():
            num_beside.append(count)
            return engine.compute(count) * (2.0 if len(num_beside) <= 2 else 1.0)
        return engine.compute(count)

    factors = LinkProbe(CPU, "disk", engine, MEASURED_BYTES).busy_factors(compute, 2.0**-6, 2.0**-6)
    assert factors == pytest.approx((1.0, 1.0))
