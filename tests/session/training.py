"""Trainings by options of `lmswap.enable`, and a stand-in for the resident memory that their budgets count."""

import torch

import lmswap
from lmswap.runtime import _C
from tests.models import CASES, Case

SMALL = 4096


CASE = CASES["resnet"]


def train(case: Case = CASE, *, num_steps: int = 1, **options):
    """Losses and gradients of a few steps, and the model's report."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(case.make(), **{"budget": "4GiB", "policy": "swap_all", "min_swap_bytes": SMALL, **options})
    results = []
    for _ in range(num_steps):
        model.zero_grad()
        loss = case.loss(model(case.batch()))
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    report = lmswap.report(model)
    lmswap.disable(model)
    return results, report


def bytes_of_the_heap() -> int:
    """Stands for resident memory: what else real ones give back meanwhile would hide growth.

    The tebibyte is more than the tests' process takes, whose own peak, less this, would be taken for a step's.
    """
    return 2**40 + _C.heap_stats().live_bytes + _C.heap_reusable_bytes()
