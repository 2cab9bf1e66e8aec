import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.unet3d.memory import MemorySampler, ResidentMeter, cpu_tensor_peak_bytes, thin

MIB = 2**20
SLACK = 32 * MIB  # what the interpreter itself takes and gives meanwhile; the kernel counts in batches on each core


def touch(nbytes):
    memory = mmap.mmap(-1, nbytes)  # from the kernel and back to it, whatever the process's heap keeps
    pages = np.frombuffer(memory, np.uint8)
    pages.fill(1)
    return pages


def test_the_peak_is_the_growth_of_the_process_and_stays():
    touch(300 * MIB)  # an earlier, higher peak must not count
    meter = ResidentMeter()
    kept = touch(64 * MIB)
    temporary = touch(128 * MIB)
    del temporary
    assert meter.now_bytes() == pytest.approx(kept.nbytes, abs=SLACK)
    assert meter.peak_bytes() == pytest.approx(192 * MIB, abs=SLACK)


def test_the_peak_survives_a_reset_by_others():
    meter = ResidentMeter()
    temporary = touch(128 * MIB)
    del temporary
    meter.now_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    assert meter.peak_bytes() == pytest.approx(128 * MIB, abs=SLACK)


class CountingMeter:
    def __init__(self):
        self.calls = 0

    def now_bytes(self):
        time.sleep(0.005)
        self.calls += 1
        return self.calls

    def peak_bytes(self):
        return self.calls


def test_the_sampler_reads_in_time_order_and_stops_with_its_block():
    meter, reported = CountingMeter(), []
    start = time.perf_counter()
    with MemorySampler(meter, reported.append, period_seconds=0.001) as sampler:
        while len(reported) < 5:
            time.sleep(0.001)
        time.sleep(0.003)  # into the middle of a reading
    end = time.perf_counter()
    calls = meter.calls
    samples = sampler.between(start, end)
    assert [nbytes for _, nbytes in samples] == reported == list(range(1, calls + 1))
    assert samples == sorted(samples) and samples[0][0] >= 0
    middle = start + samples[2][0]
    assert sampler.between(middle, end) == [(pytest.approx(t - samples[2][0]), n) for t, n in samples[2:]]
    time.sleep(0.01)
    assert meter.calls == calls


def test_thinning_keeps_order_and_peaks():
    samples = [(float(at), (at * 7919) % 1009) for at in range(950)]
    thinned = thin(samples, limit=100)
    assert len(thinned) <= 100 and list(thinned) == sorted(thinned) and set(thinned) <= set(samples)
    assert max(thinned, key=lambda sample: sample[1]) == max(samples, key=lambda sample: sample[1])
    assert thin(samples, limit=950) == tuple(samples)
    assert thin((), limit=100) == ()


def test_tensor_bytes_are_those_that_the_step_makes_and_holds_at_once():
    before = torch.ones(64 * MIB // 4)

    def step():
        a = before * 2  # 64 MiB
        b = a[: 32 * MIB // 4] * 3  # 32 MiB
        del a
        return (b + 1).sum()  # 32 MiB more, after 64 MiB are gone

    assert cpu_tensor_peak_bytes(step) == pytest.approx(96 * MIB, abs=4096)
