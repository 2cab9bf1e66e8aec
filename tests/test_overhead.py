"""A step that moves nothing takes little longer than without lmswap: counted in instructions of Python."""

import copy
import gc

import torch
from torch import nn

import lmswap
from tests.instructions import counted_instructions

# Beside torch's own, that of `torch.compile` with the backend "aot_eager"; for a few more parameters some more.
_MOST_INSTRUCTIONS = 9_000


def test_a_step_without_swaps_executes_few_instructions_more_than_torch():
    gc.collect()  # models of other tests: each has an observer of the memory's peak, which a step goes through
    gc.collect()  # what finalizers have kept
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    traced = torch.compile(copy.deepcopy(model), backend="aot_eager", dynamic=False)
    lmswap.enable(model, "2GiB")
    x = torch.randn(32, 64)

    def instructions_of(call):
        for _ in range(8):
            call(x).sum().backward()
        counted = []
        for _ in range(5):
            with counted_instructions("") as counts:
                call(x).sum().backward()
            counted += counts
        return min(counted)

    assert instructions_of(model) < instructions_of(traced) + _MOST_INSTRUCTIONS
    assert not lmswap.report(model).swapped_out_bytes
    lmswap.disable(model)
