"""Permanent memory of CUDA libraries is allocated before a step, for the threads of forward and backward; CUDA only."""

import gc
import time

import pytest
import torch
from torch import nn

import lmswap
from lmswap.hardware.cublas_workspace import allocate_cublas_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def step():
    matrix = torch.ones(16, 16, device="cuda", requires_grad=True)
    (matrix @ matrix).square().sum().backward()


def bytes_taken_for_good(run):
    before = torch.cuda.memory_allocated()
    run()
    # Autograd's thread may hold what it has worked on for a moment longer.
    for _ in range(20):
        time.sleep(0.01)
        if torch.cuda.memory_allocated() == before:
            break
    return torch.cuda.memory_allocated() - before


@pytest.fixture(autouse=True)
def no_workspaces():
    torch._C._cuda_clearCublasWorkspaces()
    yield
    torch._C._cuda_clearCublasWorkspaces()


def test_a_step_takes_no_more_after_they_were_taken():
    without = bytes_taken_for_good(step)
    assert without > 0
    torch._C._cuda_clearCublasWorkspaces()
    assert bytes_taken_for_good(lambda: allocate_cublas_workspaces(torch.device("cuda"))) == without
    assert bytes_taken_for_good(step) == 0
    assert bytes_taken_for_good(lambda: allocate_cublas_workspaces(torch.device("cuda"))) == 0


def test_forward_and_backward_threads_have_a_workspace_each():
    matrix = torch.ones(16, 16, device="cuda")

    def multiply():
        (matrix @ matrix).cpu()

    of_forward = bytes_taken_for_good(multiply)
    assert bytes_taken_for_good(lambda: allocate_cublas_workspaces(torch.device("cuda"))) == of_forward


def test_they_are_taken_in_the_middle_of_a_trace():
    def backend(module, inputs):
        with torch._subclasses.FakeTensorMode():
            taken.append(bytes_taken_for_good(lambda: allocate_cublas_workspaces(torch.device("cuda"))))
        return module.forward

    taken = []
    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, device="cuda"))
    assert taken[0] > 0


def test_measuring_the_ops_of_a_model_takes_no_third_one():
    def train():
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
        lmswap.enable(model, budget="1GiB")
        for _ in range(3):
            model(torch.ones(64, 64, device="cuda")).sum().backward()
        lmswap.disable(model)
        del model
        gc.collect()

    without = bytes_taken_for_good(step)
    torch._C._cuda_clearCublasWorkspaces()
    assert bytes_taken_for_good(train) == without


def test_a_model_is_measured_in_inference_mode_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
    x = torch.ones(64, 64, device="cuda")
    with torch.inference_mode():
        expected = model(x)
        lmswap.enable(model, budget="1GiB")
        assert torch.equal(model(x), expected)
    lmswap.disable(model)


def test_a_cpu_has_no_workspaces():
    allocate_cublas_workspaces(torch.device("cpu"))
