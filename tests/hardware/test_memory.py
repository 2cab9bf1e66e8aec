import time

import pytest
import torch

from lmswap.hardware import memory as memory_module
from lmswap.hardware.memory import CpuMemory, device_memory
from lmswap.runtime import _C

MIB = 2**20
SLACK = 64 * MIB  # resident memory is the process's: counted in batches on each core, with all that else lives in it
CPU = torch.device("cpu")


@pytest.fixture
def memory(no_garbage):
    opened = device_memory(CPU)
    yield opened
    opened.close()


def test_tensor_bytes_are_exact_and_their_peak_stays_until_reset(memory):
    before = memory.used_tensor_bytes()
    held = torch.ones(32 * MIB, dtype=torch.uint8)
    assert memory.used_tensor_bytes() - before == 32 * MIB
    del held
    assert memory.used_tensor_bytes() == before
    assert memory.peak_tensor_bytes() == before + 32 * MIB
    memory.reset_tensor_peak()
    assert memory.peak_tensor_bytes() == before
    assert memory.lap_peaks(restart=True)[1] == before + 32 * MIB
    assert memory.lap_peaks()[1] == before


def test_tensors_that_existed_before_are_no_part_of_a_growth_that_leaves_them_out(memory):
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    later = device_memory(CPU)
    start = time.monotonic()
    more = torch.ones(MIB, dtype=torch.uint8)
    assert later.used_tensor_bytes() == later.lap_tensor_peak_bytes() == later.peak_tensor_bytes() == MIB
    assert [nbytes for _, nbytes in later.tensor_changes(start, time.monotonic())] == [MIB]
    assert later.lap_peaks()[1] == MIB
    later.count(held.nbytes)
    assert later.used_tensor_bytes() == held.nbytes + more.nbytes
    later.close()


def test_used_bytes_begin_at_zero_and_follow_resident_memory(memory):
    assert memory.used_bytes() < SLACK
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    assert memory.used_bytes() > held.nbytes - SLACK
    assert memory.lap_peaks()[0] > held.nbytes - SLACK
    assert held[-1] == 1


def test_growth_that_is_not_counted_is_beside_what_is_used(memory):
    before_bytes = memory.excluded_bytes()
    with memory.uncounted():
        held = torch.ones(256 * MIB, dtype=torch.uint8)
    assert memory.used_bytes() < SLACK
    assert abs(memory.excluded_bytes() - before_bytes - held.nbytes) < SLACK


def test_peaks_of_growth_that_is_not_counted_are_in_no_figure(memory):
    before = torch.ones(64 * MIB, dtype=torch.uint8)
    del before
    with memory.uncounted():
        torch.ones(256 * MIB, dtype=torch.uint8)
    for peak in (*memory.lap_peaks(), memory.peak_tensor_bytes()):
        assert abs(peak - 64 * MIB) < SLACK
    after = torch.ones(128 * MIB, dtype=torch.uint8)
    assert memory.lap_peaks()[0] > after.nbytes - SLACK


def test_memory_freed_before_counting_hides_no_growth():
    scraps = [bytearray(64 * 2**10) for _ in range(4000)]  # below the size that the C library maps on its own
    del scraps[:-1]  # the last one keeps the freed pages from going back by themselves
    memory = device_memory(CPU)
    try:
        memory.trim()
        held = torch.ones(128 * MIB, dtype=torch.uint8)
        assert memory.used_bytes() > held.nbytes - SLACK
        assert (held[-1], len(scraps)) == (1, 1)
    finally:
        memory.close()


def test_trim_releases_memory_cached_for_reuse(memory):
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    del held
    memory.trim()
    assert memory.used_bytes() < SLACK


@pytest.mark.usefixtures("no_garbage")
def test_the_heap_serves_until_the_last_one_closes():
    num_others = CpuMemory._num_open  # of models of tests before
    first, second = CpuMemory(CPU), CpuMemory(CPU)
    first.close()
    first.close()
    assert _C.heap_is_installed()
    second.close()
    assert _C.heap_is_installed() == (num_others > 0)


def test_free_memory_is_part_of_the_capacity(memory):
    assert 0 < memory.free_bytes() <= memory.total_bytes()
    memory.synchronize()


def test_the_device_is_named_for_people(memory):
    assert memory.description().startswith("cpu (")
    assert memory.description().endswith((" thread)", " threads)"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_counts_what_torch_allocated():
    memory = device_memory(torch.device("cuda", 0))
    before = memory.used_bytes()
    held = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
    assert memory.used_bytes() - before == 32 * MIB
    del held
    assert (memory.used_bytes(), memory.lap_peaks()[0]) == (before, before + 32 * MIB)
    assert memory.free_bytes() <= memory.total_bytes()
    memory.close()


def test_a_closed_memory_is_observed_no_longer(memory):
    trackers = memory_module._RESIDENT, memory_module._live()
    before = [len(tracker._watches) for tracker in trackers]
    memory.close()
    assert [len(tracker._watches) for tracker in trackers] == [before[0] - 1, before[1] - 2]
    assert memory.lap_peaks()[0] >= 0
