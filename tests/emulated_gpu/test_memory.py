"""The emulated GPU's memory is as large as it says, belongs to the device alone, and is used only while allocated."""

import ctypes
import signal
import subprocess
import sys

import pytest
import torch

MIB = 2**20
PAGE = 4096
INVALID_VALUE, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = 1, 700, 712, 713


def driver():
    return ctypes.CDLL("libcuda.so.1")


def test_the_capacity_is_kept_with_torchs_own_error(emulated_gpu):
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    emulated_gpu.set_capacity(total_bytes - free_bytes + 64 * MIB)
    kept = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 20\.00 MiB"):
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    del kept  # torch gives it back to the device when it runs out, and tries again
    torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")


def test_freed_neighbours_are_one_hole_again(emulated_gpu):
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    blocks = [torch.empty(40 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    first = blocks[0].data_ptr()
    for i in (1, 3, 0, 2):
        blocks[i] = None
        torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before
    assert torch.empty(160 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == first


def test_host_code_that_follows_a_device_pointer_dies():
    program = """
import ctypes, torch
from tools.emulated_gpu import machine
machine.start()
ctypes.string_at(torch.ones(4, device="cuda").data_ptr(), 4)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == -signal.SIGSEGV


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"])
def test_the_drivers_asynchronous_copies_refuse_pageable_memory(call, emulated_gpu):
    device, host = torch.ones(64, device="cuda"), torch.ones(64, device="cpu")
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (device, host)]
    if call.startswith("cuMemcpyDtoH"):
        addresses.reverse()
    assert getattr(driver(), call)(*addresses, ctypes.c_size_t(256), None) == INVALID_VALUE
    [violation] = emulated_gpu.take_violations()
    assert "pageable memory" in violation


def test_a_driver_call_without_a_context_is_refused(emulated_gpu):
    program = """
import ctypes, threading, torch
from tools.emulated_gpu import machine
machine.start()
codes = []
thread = threading.Thread(target=lambda: codes.append(ctypes.CDLL("libcuda.so.1").cuStreamSynchronize(None)))
thread.start(), thread.join()
assert codes == [201]
assert "no context is current" in machine.take_violations()[0]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_use_of_freed_memory_breaks_the_context(emulated_gpu):
    address = ctypes.c_void_p()
    assert driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(MIB)) == 0
    assert driver().cuMemFree_v2(address) == 0
    fill = driver().cuMemsetD8Async
    assert fill(address, ctypes.c_ubyte(1), ctypes.c_size_t(MIB), None) == ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    [violation] = emulated_gpu.take_violations()
    assert "not allocated" in violation


def test_a_double_free_is_a_violation(emulated_gpu):
    runtime, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    runtime.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(MIB), ctypes.c_uint(0))
    assert runtime.cudaFreeHost(address) == 0
    assert runtime.cudaFreeHost(address) == INVALID_VALUE
    assert runtime.cudaGetLastError() == INVALID_VALUE  # which torch would find at its next call
    assert emulated_gpu.take_violations() == ["pinned memory is given back that is not allocated"]


def test_registered_memory_is_pinned_as_one_piece(emulated_gpu):
    host = torch.zeros(3 * PAGE, dtype=torch.uint8, device="cpu")
    device = torch.ones(2 * PAGE, dtype=torch.uint8, device="cuda")
    begin = -(-host.data_ptr() // PAGE) * PAGE
    pieces = [ctypes.c_void_p(begin), ctypes.c_void_p(begin + PAGE)]
    for piece in pieces:
        assert driver().cuMemHostRegister_v2(piece, ctypes.c_size_t(PAGE), ctypes.c_uint(1)) == 0

    def copy_out(nbytes):
        source = ctypes.c_void_p(device.data_ptr())
        return driver().cuMemcpyDtoHAsync_v2(pieces[0], source, ctypes.c_size_t(nbytes), None)

    assert copy_out(PAGE) == 0
    torch.cuda.synchronize()
    assert int(host.sum()) == PAGE
    assert emulated_gpu.take_violations() == []
    assert copy_out(2 * PAGE) == INVALID_VALUE  # of two registrations
    assert driver().cuMemHostRegister_v2(pieces[1], ctypes.c_size_t(PAGE), ctypes.c_uint(1)) == ALREADY_REGISTERED
    for piece in pieces:
        assert driver().cuMemHostUnregister(piece) == 0
    assert driver().cuMemHostUnregister(pieces[1]) == NOT_REGISTERED
    across, again, unpinned = emulated_gpu.take_violations()
    assert "pageable memory" in across
    assert again == "memory is pinned that is pinned already"
    assert unpinned == "memory is unpinned that is not pinned"
