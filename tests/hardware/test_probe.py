import pytest
import torch

from lmswap.errors import TransferError
from lmswap.hardware import probe as probes
from lmswap.hardware.microbench import convolution
from lmswap.hardware.probe import LinkProbe
from tests.hardware.fake_engine import FakeEngine

CPU = torch.device("cpu")
MIB = 2**20


def probe(**engine):
    return LinkProbe(CPU, "disk", FakeEngine(**engine))


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
def test_what_copies_and_compute_leave_each_other_is_found(beside, out_rate, in_rate):
    engine = FakeEngine(out_rate, in_rate, 1.0, beside=beside)
    found = LinkProbe(CPU, "disk", engine).busy_factors(engine.compute, 16 * MIB / out_rate, 16 * MIB / in_rate)
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


def test_a_machine_without_noise_is_known_after_few_copies_beside_compute():
    engine = FakeEngine(2**30, 2**29, 1.0, beside=(0.8, 0.9))
    LinkProbe(CPU, "disk", engine).busy_factors(engine.compute, 2.0**-6, 2.0**-5)
    assert engine.clock < 3.0


def test_a_noisy_machine_is_measured_until_others_load_is_outvoted():
    engine, num_beside = FakeEngine(2**30, 2**30, 1.0), []

    def compute(count):
        if count > 1 and not engine.is_idle():
            num_beside.append(count)
            return engine.compute(count) * (2.0 if len(num_beside) <= 2 else 1.0)
        return engine.compute(count)

    factors = LinkProbe(CPU, "disk", engine).busy_factors(compute, 2.0**-6, 2.0**-6)
    assert factors == pytest.approx((1.0, 1.0))
