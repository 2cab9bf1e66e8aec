"""Trainings by options of `lmswap.enable`, and a stand-in for the resident memory that their budgets count."""

import torch

import lmswap
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
