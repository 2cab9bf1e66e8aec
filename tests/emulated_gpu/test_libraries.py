"""The emulated libraries allocate workspaces and choose algorithms as NVIDIA's do."""

import threading

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel


def peak_above_results(run):
    """Bytes that a call takes beside what it makes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), result


def test_a_convolutions_workspace_is_of_torchs_allocator_and_is_freed(emulated_gpu):
    x, weight = torch.ones(1, 4, 64, 64, device="cuda"), torch.ones(2, 4, 3, 3, device="cuda")
    nbytes, _ = peak_above_results(lambda: F.conv2d(x, weight))
    assert nbytes == x.nbytes
    emulated_gpu.configure_kernels(convolution_workspaces=False)
    nbytes, _ = peak_above_results(lambda: F.conv2d(x, weight))
    assert nbytes == 0


def in_another_thread(run):
    results = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    [result] = results
    return result


def test_products_take_a_workspace_for_good_in_each_thread_and_stream():
    x = torch.ones(2, 2, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    used_bytes = [torch.cuda.memory_allocated()]

    def multiply():
        torch.cuda.synchronize()  # torch warns where a thread's first call is to cuBLAS
        (x @ x).cpu()
        used_bytes.append(torch.cuda.memory_allocated())

    multiply()
    multiply()
    with torch.cuda.stream(torch.cuda.Stream()):
        multiply()
    in_another_thread(multiply)
    start, first, again, other_stream, other_thread = used_bytes
    nbytes = first - start
    assert nbytes > 0
    assert [again - first, other_stream - again, other_thread - other_stream] == [0, nbytes, nbytes]


def test_configured_kernels_vary_sums_by_call_and_convolutions_by_thread(emulated_gpu):
    x, rows = torch.ones(8, 4, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
    image, weight = torch.ones(1, 1, 8, 8, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda")

    def add():
        return torch.zeros(1, 4, device="cuda").index_add(0, rows, x).cpu()

    def convolve():
        return F.conv2d(image, weight).cpu()

    assert torch.equal(add(), add())
    assert torch.equal(convolve(), in_another_thread(convolve))
    emulated_gpu.configure_kernels(sums_in_any_order=True, kernels_by_thread=True)
    assert not torch.equal(add(), add())
    assert torch.equal(convolve(), convolve())
    assert not torch.equal(convolve(), in_another_thread(convolve))


@pytest.mark.parametrize("is_causal", [False, True])
def test_efficient_attention_is_attention(is_causal):
    inputs = [torch.randn(2, 3, 17, 8, device="cuda", requires_grad=True) for _ in range(3)]
    found = []
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert type(output.grad_fn).__name__ != type(found[0][0].grad_fn).__name__
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


def test_the_host_seed_of_efficient_attention_determines_dropout():
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    x = torch.randn(1, 2, 32, 8, device="cuda")
    torch.cuda.manual_seed(0)
    output, sums, seed, offset = attend(x, x, x, None, True, 0.5)
    assert seed.device.type == offset.device.type == "cpu"
    differentiate = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    masks = (True, True, True, False)
    results = [
        differentiate(output, x, x, x, None, output, sums, seed, moved, 0.5, masks)[2].cpu()
        for moved in (offset, offset, offset + 4)
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
