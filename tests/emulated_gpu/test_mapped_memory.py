"""Kernels read and write pinned host memory in place, over the link, in the order that streams and events give."""

import ctypes
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

MIB = 2**20
PAGE = 4096
DEVICE_MAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def on_device(host):
    """The bytes of a CPU tensor as a tensor on a GPU; both must be kept alive."""
    shape = (ctypes.c_int64 * 1)(host.numel() * host.element_size())
    kept = DLTensor(host.data_ptr(), 2, 0, 1, 1, 8, 1, ctypes.addressof(shape), None, 0, None, None)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    flat = torch.utils.dlpack.from_dlpack(make(ctypes.addressof(kept), b"dltensor", None))
    host.described = (kept, shape)
    return flat.view(host.dtype).view(host.shape)


def pinned(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="cpu", pin_memory=True)


def filled(*shape):
    torch.manual_seed(0)
    host = pinned(*shape)
    return host.copy_(torch.randn(*shape, device="cpu"))


@pytest.mark.parametrize(
    "run",
    [
        lambda w, x: w * x,
        lambda w, x: w.sum(dim=0) + x.sum(),
        lambda w, x: x @ w.t(),
        lambda w, x: torch.nn.functional.linear(x, w),
        lambda w, x: torch.nn.functional.conv2d(x.view(4, 16, 8, 8), w.view(16, 16, 4, 4)),
        lambda w, x: scaled_dot_product_attention(*(t.view(1, 4, 16, 64) for t in (x, w, x))),
        lambda w, x: w.index_select(0, torch.tensor([3, 1, 3], device=x.device)) + x[:3],
        lambda w, x: torch.cat([w, x]).view(-1)[::3],
    ],
)  # fmt: skip
def test_kernels_read_host_memory_in_place(run, emulated_gpu):
    host, x = filled(64, 64), torch.randn(64, 64, device="cpu")
    weight = on_device(host)
    allocated_bytes = torch.cuda.memory_allocated()
    assert weight.data_ptr() == host.data_ptr()
    assert weight.device == torch.device("cuda", 0)
    assert torch.cuda.memory_allocated() == allocated_bytes
    assert torch.equal(run(weight, x.cuda()).cpu(), run(host, x))
    assert emulated_gpu.take_violations() == []


def test_kernels_write_host_memory_in_place(emulated_gpu):
    host = filled(64, 64)
    expected = host.clone().mul_(2).add_(1)
    expected[0] = 7
    weight = on_device(host)
    weight.mul_(2).add_(1)
    weight[0] = 7
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    weight.zero_()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight.requires_grad_()], 0.5).step()
    torch.cuda.synchronize()
    assert host.unique().tolist() == [-0.5]
    assert emulated_gpu.take_violations() == []


def test_host_memory_is_copied_like_that_of_the_device(emulated_gpu):
    host, other = filled(64, 64), filled(32, 128).view(64, 64).neg_()
    weight, device = on_device(host), torch.empty(64, 64, device="cuda")
    device.copy_(weight)
    assert torch.equal(device.cpu(), host)
    assert torch.equal(weight.cpu(), host)
    for source in (device.neg(), torch.ones(64, 64, device="cpu"), on_device(other), other):
        weight.copy_(source)
        torch.cuda.synchronize()
        assert torch.equal(host, source.cpu())
    assert emulated_gpu.take_violations() == []


def test_gradients_of_a_frozen_layer_in_host_memory_are_those_of_one_on_the_device(emulated_gpu):
    host, x = filled(64, 64), torch.randn(8, 64, device="cuda")
    gradients = []
    for weight in (host.cuda(), on_device(host)):
        given = x.clone().requires_grad_()
        torch.nn.functional.linear(given, weight).tanh().square().sum().backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)
    assert emulated_gpu.take_violations() == []


def test_a_copy_into_host_memory_that_a_kernel_still_reads_is_a_violation(emulated_gpu):
    emulated_gpu.configure(in_rate=MIB)  # a quarter of a second for the kernel
    host, source = pinned(256, 256).zero_(), torch.ones(256, 256, device="cuda")
    weight, side = on_device(host), torch.cuda.Stream()
    torch.cuda.synchronize()
    doubled = weight * 2
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    [violation] = emulated_gpu.take_violations()
    assert f"writes {host.nbytes} bytes that" in violation
    side.wait_stream(torch.cuda.current_stream())
    doubled += weight
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert emulated_gpu.take_violations() == []


def milliseconds(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def test_a_kernel_takes_the_links_time_for_host_memory(emulated_gpu):
    host = pinned(MIB, dtype=torch.uint8).zero_()
    weight, device = on_device(host), torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    emulated_gpu.configure(in_rate=5 * MIB, out_rate=2.5 * MIB)
    emulated_gpu.configure_compute(memory_rate=1e12)
    assert milliseconds(lambda: weight + device) >= 200
    assert milliseconds(lambda: weight.fill_(1)) >= 400
    assert milliseconds(lambda: device.copy_(weight)) >= 200
    assert math.isclose(milliseconds(lambda: device + device), 0, abs_tol=100)


def registered(flags):
    host = torch.ones(2 * PAGE, dtype=torch.uint8, device="cpu")
    begin = -host.data_ptr() % PAGE
    page = host[begin : begin + PAGE]
    address, driver = ctypes.c_void_p(page.data_ptr()), ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()  # the context is current
    assert driver.cuMemHostRegister_v2(address, ctypes.c_size_t(PAGE), ctypes.c_uint(1 | flags)) == 0
    return page, lambda: driver.cuMemHostUnregister(address)


def test_registered_memory_is_read_if_it_is_mapped(emulated_gpu):
    page, unregister = registered(DEVICE_MAP)
    assert (on_device(page) + 1).unique().tolist() == [2]
    torch.cuda.synchronize()
    assert unregister() == 0
    assert emulated_gpu.take_violations() == []


@pytest.mark.parametrize("kind", ["registered", "pageable"])
def test_a_kernel_breaks_the_context_by_other_host_memory(kind, emulated_gpu):
    page, unregister = registered(0) if kind == "registered" else (torch.ones(PAGE, device="cpu"), None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        on_device(page) + 1
    [violation] = emulated_gpu.take_violations()
    assert violation.endswith("uses host memory that the device cannot address")
    emulated_gpu.mend()
    if unregister:
        assert unregister() == 0


def test_memory_that_a_queued_kernel_reads_is_not_unregistered(emulated_gpu):
    emulated_gpu.configure(in_rate=PAGE * 10)
    page, unregister = registered(DEVICE_MAP)
    result = on_device(page) + 1
    assert unregister() == 0
    [violation] = emulated_gpu.take_violations()
    assert "given back before the host knows that" in violation
    del result
