"""Large plain copies on a GPU that is only a clock: what is queued, in which order, and what is made of the times."""

from contextlib import contextmanager

import pytest
import torch

from lmswap.errors import TierError
from lmswap.hardware import link_peak


class Gpu:
    """Copies take 2 s out and 1 s in, one after another; a convolution takes 0.5 s and, beside copies, 0.6 s."""

    def __init__(self):
        self.clock, self.log, self.copied = 0.0, [], False

    def copy(self, way):
        self.clock += {"out": 2.0, "in": 1.0}[way]
        self.log.append(way)
        self.copied = True

    def convolve(self, count):
        self.log.append(f"conv {count}")
        copied, self.copied = self.copied, False
        return count * (0.6 if copied else 0.5)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Buffer:
        def __init__(self, way_in_here):
            self.way = way_in_here

        def copy_(self, source, non_blocking):
            assert non_blocking
            assert source.way != self.way
            gpu.copy(self.way)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.seconds = gpu.clock

        def synchronize(self):
            assert self.seconds <= gpu.clock

        def elapsed_time(self, end):
            return 1e3 * (end.seconds - self.seconds)

    @contextmanager
    def stream(chosen):
        yield

    monkeypatch.setattr(link_peak, "_pinned_buffer", lambda: Buffer("out"))
    monkeypatch.setattr(link_peak, "_device_buffer", lambda device: Buffer("in"))
    monkeypatch.setattr(link_peak, "convolution", lambda device: gpu.convolve)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(gpu, "copied", False))
    return gpu


def test_rates_are_those_of_sixteen_copies_behind_four(gpu):
    out, into = link_peak.peak_rates(torch.device("cuda", 0))
    assert (out.bytes_per_second, into.bytes_per_second) == (2**29 / 2, 2**29)
    assert (out.both_bytes_per_second, out.busy_bytes_per_second) == (2**29 / 2, 2**29 / 2)
    alone = gpu.log[1 : 1 + 3 * 20]
    assert alone == ["out"] * 60
    beside = gpu.log[61 : 61 + 3 * (44 + 20)]
    assert (
        beside == (["in"] * 44 + ["out"] * 20) * 3
    )  # the other way moves more than twice as much, and is queued first


def test_overlap_slows_copies_and_the_loss_of_compute_is_measured(gpu):
    out, into = link_peak.peak_rates(torch.device("cuda", 0))
    # 20 copies of 2 s: twice that is 80 s, or 160 convolutions of 0.5 s, and one more; each loses 0.1 s.
    assert "conv 161" in gpu.log
    assert out.compute_factor == pytest.approx(1 - 16.1 / 40)
    assert "conv 81" in gpu.log
    assert into.compute_factor == pytest.approx(1 - 8.1 / 20)


def test_failed_allocations_raise_a_tier_error(gpu, monkeypatch):
    def refuse():
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(link_peak, "_pinned_buffer", refuse)
    with pytest.raises(TierError, match=r"copies of 512.00 MiB: CUDA error: out of memory"):
        link_peak.peak_rates(torch.device("cuda", 0))
