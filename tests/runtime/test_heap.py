import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lmswap.errors import OptionError
from lmswap.runtime import _C

MIB = 2**20
THRESHOLD = 64 * 1024
LIBRARIES = ["libc10.so", "libtorch_cpu.so"]


@pytest.fixture(autouse=True)
def heap(no_garbage):
    _C.heap_install(THRESHOLD, LIBRARIES)
    yield
    _C.heap_uninstall()


def mebibytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


def train(steps: int) -> list[torch.Tensor]:
    """Losses and parameters of a small convolutional training: oneDNN's scratch, autograd and an optimizer at work."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(4, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.LeakyReLU(), nn.Dropout3d(0.3),
        nn.Conv3d(16, 32, 3, stride=2, padding=1), nn.LeakyReLU(), nn.Upsample(scale_factor=2), nn.Conv3d(32, 3, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(1, 4, 32, 32, 32)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [parameter.detach() for parameter in model.parameters()]


def test_tensors_above_the_threshold_are_page_aligned_in_the_heap():
    large, small = mebibytes(4), torch.empty(1024)
    assert _C.heap_owns(large.data_ptr())
    assert large.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
    assert not _C.heap_owns(small.data_ptr())


def test_live_and_peak_bytes_are_those_of_the_tensors():
    before = _C.heap_stats().live_bytes
    _C.heap_reset_peak()
    first = mebibytes(4)
    second = mebibytes(2)
    assert _C.heap_stats().live_bytes - before == 6 * MIB
    del first
    assert _C.heap_stats().live_bytes - before == 2 * MIB
    assert _C.heap_stats().peak_live_bytes - before == 6 * MIB
    del second
    assert _C.heap_stats().live_bytes == before


def test_changes_are_returned_in_order_between_two_times():
    began, before = time.perf_counter(), _C.heap_stats().live_bytes
    first = mebibytes(4)
    middle = time.perf_counter()
    second = mebibytes(2)
    del first, second
    changes = [(seconds, live - before) for seconds, live in _C.heap_changes(began, time.perf_counter())]
    assert [live for _, live in changes] == [4 * MIB, 6 * MIB, 2 * MIB, 0]
    assert sorted(changes) == changes
    assert [live - before for _, live in _C.heap_changes(began, middle)] == [4 * MIB]
    assert not _C.heap_changes(time.perf_counter(), time.perf_counter())


def test_scratch_of_convolution_kernels_is_counted():
    x, weight = torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3)
    before = _C.heap_stats().live_bytes
    _C.heap_reset_peak()
    y = torch.nn.functional.conv2d(x, weight, padding=1)
    assert _C.heap_stats().peak_live_bytes - before > y.nbytes


def test_scratch_in_arrays_of_c_plus_plus_is_counted():
    # torch 2.13 copies the gradient of the output, and then the weight, into an array each.
    x, weight = torch.randn(1, 64, 32, 32).bfloat16(), torch.randn(64, 64, 3, 3).bfloat16()
    y, before = torch.empty(1, 64, 32, 32).bfloat16(), _C.heap_stats().live_bytes
    _C.heap_reset_peak()
    torch.ops.aten._slow_conv2d_backward.output_mask(y, x, weight, (3, 3), (1, 1), (1, 1), (True, False, False))
    assert _C.heap_stats().peak_live_bytes - before > x.nbytes + 9 * x.nbytes + 2**20
    assert _C.heap_stats().live_bytes == before


def test_training_gives_the_same_bits_with_and_without():
    with_heap = train(3)
    _C.heap_uninstall()
    assert not _C.heap_is_installed()
    for ours, plain in zip(with_heap, train(3), strict=True):
        assert torch.equal(ours, plain)


def test_a_repeated_step_stops_faulting():
    def step() -> None:
        x = mebibytes(8).fill_(1)
        y = (x + 1)[: 4 * MIB].clone()
        del x
        (y * y).sum()

    step()
    before = _C.heap_stats().num_fresh_pages
    assert before > 0
    for _ in range(10):
        step()
    assert _C.heap_stats().num_fresh_pages == before


def test_freed_tensor_memory_is_reused_until_it_is_trimmed():
    _C.heap_trim()
    tensor = mebibytes(64).fill_(1)
    address = tensor.data_ptr()
    del tensor
    assert _C.heap_stats().retained_bytes == _C.heap_reusable_bytes() == 64 * MIB
    _C.heap_trim()
    assert _C.heap_stats().retained_bytes == 0
    again = mebibytes(64)
    assert again.data_ptr() == address
    assert int(again.sum()) == 0  # the kernel's own pages: those that were written to are gone


def test_resident_memory_never_passes_the_limit():
    _C.heap_trim()
    keep = mebibytes(32).fill_(1)
    limit_bytes = _C.heap_stats().live_bytes + 16 * MIB
    _C.heap_set_limit(limit_bytes)
    _C.heap_reset_peak()
    for size in (4, 16, 8, 2, 12):
        mebibytes(size).fill_(1)
    assert _C.heap_stats().peak_resident_bytes <= limit_bytes + THRESHOLD
    assert keep.nbytes <= limit_bytes


def test_tensors_outlive_uninstall():
    tensor = mebibytes(8).fill_(7)
    _C.heap_uninstall()
    assert bool((tensor == 7).all())
    assert not _C.heap_owns(mebibytes(8).data_ptr())
    before = _C.heap_stats()
    del tensor
    after = _C.heap_stats()
    assert before.live_bytes - after.live_bytes == 8 * MIB
    assert after.retained_bytes == 0


def test_installing_twice_is_installing_once():
    _C.heap_install(THRESHOLD, LIBRARIES)
    assert _C.heap_owns(mebibytes(1).data_ptr())
    _C.heap_uninstall()
    assert not _C.heap_owns(mebibytes(1).data_ptr())


def test_tensors_may_be_made_and_dropped_by_different_threads():
    errors = []

    def churn(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        kept = mebibytes(1).fill_(seed)
        for _ in range(50):
            size = int(torch.randint(THRESHOLD, 2 * MIB, (), generator=generator))
            block = torch.full((size,), seed, dtype=torch.uint8)
            if not bool((block == seed).all()):
                errors.append(f"thread {threading.get_ident()}: a block of {size} bytes lost its contents")
        return kept

    before = _C.heap_stats().live_bytes
    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(churn, range(4)))
    assert not errors
    assert all(bool((tensor == seed).all()) for seed, tensor in enumerate(kept))
    del kept
    assert _C.heap_stats().live_bytes == before


def _use_in_child(inherited: torch.Tensor, answer) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; DataLoader workers do the same
    fresh = mebibytes(4).fill_(3)
    answer.send((int(inherited.sum()), _C.heap_owns(fresh.data_ptr()), int(fresh.sum())))
    answer.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # Python 3.12 on: torch's threads are about
def test_a_forked_child_works():
    inherited = mebibytes(4).fill_(1)
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_use_in_child, args=(inherited, send))
    child.start()
    send.close()  # so that a child that dies is an end of file, and no wait
    assert receive.recv() == (4 * MIB, True, 12 * MIB)
    child.join()
    assert child.exitcode == 0
    assert int(inherited.sum()) == 4 * MIB


def test_data_loader_workers_send_batches_of_heap_tensors():
    loader = torch.utils.data.DataLoader(
        [torch.full((MIB,), i, dtype=torch.float32) for i in range(4)], num_workers=2, multiprocessing_context="fork"
    )
    assert [int(batch.flatten()[-1]) for batch in loader] == [0, 1, 2, 3]


def test_more_than_the_machine_has_is_refused_as_in_plain_torch():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(2**60, dtype=torch.uint8)


def test_leaving_python_with_live_tensors_is_clean():
    script = (
        "import torch; from lmswap.runtime import _C\n"
        f"_C.heap_install({THRESHOLD}, {LIBRARIES})\n"
        "torch.kept = torch.ones(2**22); torch.cyclic = [torch.ones(2**22)]; torch.cyclic.append(torch.cyclic)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("threshold", "libraries", "reason"),
    [
        (0, LIBRARIES, "threshold"),
        (-1, LIBRARIES, "threshold"),
        (THRESHOLD, [], "at least one library"),
        (THRESHOLD, ["libno_such.so"], "libno_such.so"),
        (THRESHOLD, ["libgomp.so.1"], "nothing to serve"),
    ],
)
def test_a_bad_installation_is_refused_with_its_reason(threshold, libraries, reason):
    _C.heap_uninstall()
    with pytest.raises(OptionError, match=reason):
        _C.heap_install(threshold, libraries)
    assert not _C.heap_is_installed()
