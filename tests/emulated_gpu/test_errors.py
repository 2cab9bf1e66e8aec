"""Errors of the emulated GPU come as a real one's: late, at the next call, and from then on at every call."""

import ctypes
import mmap
import os
import threading

import pytest
import torch

OUT_OF_MEMORY, ALREADY_REGISTERED, UNKNOWN = 2, 712, 999
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def break_context():
    """An embedding of a token that there is not: nothing is wrong yet when the call returns."""
    return torch.nn.functional.embedding(torch.tensor([99], device="cuda"), torch.ones(4, 4, device="cuda"))


def test_a_kernels_failure_shows_in_a_later_call_and_in_every_one_after_it(emulated_gpu, capfd):
    break_context()
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        torch.cuda.synchronize()
    for call in (torch.cuda.synchronize, lambda: torch.ones(1, device="cuda"), torch.cuda.Event(blocking=True).record):
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            call()
    assert "index out of range" in capfd.readouterr().err


def test_other_threads_get_the_error_too(emulated_gpu):
    break_context()
    found = []

    def ask():
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        torch.cuda.synchronize()
    assert "device-side assert triggered" in found[0]


def test_planned_faults_come_once_and_leave_the_context_whole(emulated_gpu):
    emulated_gpu.plan_fault("cudaMalloc", 1, OUT_OF_MEMORY)
    torch.cuda.empty_cache()
    assert torch.ones(2**22, device="cuda")[0].item() == 1  # torch frees what it can and tries again
    emulated_gpu.plan_fault("cudaEventRecordWithFlags", 1, UNKNOWN)
    emulated_gpu.plan_fault("cudaEventRecord", 1, UNKNOWN)
    event = torch.cuda.Event()
    with pytest.raises(RuntimeError, match="unknown error"):
        event.record()
    event.record()


def test_a_repaired_gpu_forgets_freed_pinned_memory(emulated_gpu):
    libc, cuda, fixed = ctypes.CDLL(None), torch.cuda.cudart(), 0x10
    libc.mmap.restype = ctypes.c_void_p

    def mapped(at, flags):
        return libc.mmap(ctypes.c_void_p(at), mmap.PAGESIZE, mmap.PROT_READ, flags | ANONYMOUS, -1, 0)

    def pinned(at):
        return int(cuda.cudaHostRegister(at, mmap.PAGESIZE, 0))

    address = mapped(None, 0)
    assert pinned(address) == 0
    emulated_gpu.mend()
    assert pinned(address) == ALREADY_REGISTERED
    assert len(emulated_gpu.take_violations()) == 1
    libc.munmap(ctypes.c_void_p(address), mmap.PAGESIZE)
    emulated_gpu.mend()
    assert mapped(address, fixed) == address
    assert pinned(address) == 0
    assert int(cuda.cudaHostUnregister(address)) == 0
    libc.munmap(ctypes.c_void_p(address), mmap.PAGESIZE)


def test_a_kernel_without_a_stand_in_is_an_error_that_names_it(emulated_gpu):
    with pytest.raises(RuntimeError, match=r"no stand-in for the kernel at::cuda::.*spin_kernel"):
        torch.cuda._sleep(1000)
    [violation] = emulated_gpu.take_violations()
    assert "spin_kernel" in violation


def test_an_operator_without_a_cpu_kernel_is_an_error_that_names_it(emulated_gpu):
    x = torch.ones(2, 4, 8, device="cuda", dtype=torch.half)
    with pytest.raises(NotImplementedError, match="no stand-in for the kernels of aten::_flash_attention_forward"):
        torch.ops.aten._flash_attention_forward(x, x, x, None, None, 4, 4, 0.0, False, False)


def test_a_forked_child_has_no_device():
    torch.ones(1, device="cuda")
    child = os.fork()
    if child == 0:
        not_initialized = ctypes.CDLL("libcudart.so.13").cudaDeviceSynchronize() == 3
        os._exit(0 if not_initialized else 1)
    assert os.waitpid(child, 0)[1] == 0
