"""Steps that save thousands of tensors are recorded and planned in time and files in proportion."""

import itertools
import resource

import pytest
import torch
from torch import nn

import lmswap
from tests.instructions import counted_instructions
from tests.models import quick_of


class Chain(nn.Module):
    """Saves a tensor of 4 KiB for each of its ops."""

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.full((1024,), 0.01))

    def forward(self, x):
        for _ in range(self.length):
            x = torch.sin(x + self.weight)
        return x


class Packed(torch.autograd.Function):
    """One op that saves all its inputs, as reversible and fused ones do."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum(tensor.sum() for tensor in tensors)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(gradient.expand_as(tensor) for tensor in ctx.saved_tensors)


class OneNode(nn.Module):
    """Its one backward node takes back as many tensors as there are weights."""

    def __init__(self, length):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((1024,), 0.01)) for _ in range(length))

    def forward(self, x):
        return Packed.apply(*(x * weight for weight in self.weights))


def hooked(model, **options):
    return lmswap.enable(model, compiler="eager", min_swap_bytes=1024, **options)


def instructions(model, options):
    """Of a first step, which is recorded, and of the second, which is planned for."""
    hooked(model, **options)
    with counted_instructions() as counts:
        for _ in range(2):
            model(torch.ones(1024)).sum().backward()
    lmswap.disable(model)
    return counts[0]


class Collected(Chain):
    """A chain whose forward collects what it saves, as loops over time steps do."""

    def forward(self, x):
        collected = []
        for _ in range(self.length):
            x = torch.sin(x + self.weight)
            collected.append(x)
        return torch.stack(collected).mean()


OPTIONS = {
    "all leave": {"policy": "swap_all"},
    "all stay": {"budget": "4GiB"},
    "verified": {"policy": "swap_all", "verify": True},
}


@pytest.mark.parametrize(
    ("network", "options"),
    quick_of(itertools.product([Chain, Collected, OneNode], OPTIONS), [(Chain, "all leave"), (Collected, "all leave")]),
)
def test_instructions_to_record_a_tensor_do_not_grow_with_their_number(network, options):
    instructions(network(8), OPTIONS[options])  # what is done once
    few, many = (instructions(network(length), OPTIONS[options]) for length in (80, 240))
    assert many <= 3.2 * few  # up to 64 swap-outs are retried at each event, less than that on average of 80 tensors


def test_recording_and_planning_a_tensor_takes_15000_instructions_at_most():
    instructions(Chain(8), OPTIONS["all leave"])  # what is done once
    few, many = (instructions(Chain(length), OPTIONS["all leave"]) for length in (40, 80))
    assert many - few <= 40 * 15_000


def test_as_many_files_are_open_for_many_tensors_as_for_few():
    model = hooked(Chain(600), policy="swap_all")
    plain = Chain(600)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        for chain in (model, plain):
            chain(torch.ones(1024)).sum().backward()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert lmswap.report(model).tier_peak_bytes >= 590 * 4096


@pytest.mark.cpu_only("a GPU's allocator counts tensors of any size")
def test_tensors_too_small_to_be_counted_are_a_part_of_the_step_that_saves_them():
    class Model(Chain):
        def forward(self, x):
            large = torch.sigmoid(x * self.weight[0])
            return super().forward(large[:1024].clone()) + large.sum()

    model = lmswap.enable(Model(2000), "1GiB", compiler="eager")
    for _ in range(2):
        model(torch.randn(2**19)).sum().backward()
    program, least_bytes = lmswap.program(model), lmswap.least_budget(model)
    small_bytes = sum(buffer.nbytes for buffer in program.buffers if buffer.nbytes < 64 * 2**10)
    saved_bytes = 2000 * 4096
    assert saved_bytes < small_bytes < 3 * saved_bytes  # with what autograd records of each
    assert least_bytes > saved_bytes
    lmswap.disable(model)
