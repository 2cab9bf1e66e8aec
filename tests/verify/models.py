"""Models whose steps the tests of verification run, and how they enable them."""

import torch
from torch import nn

import lmswap
from tests.models import CASES, Broken, Case
from tests.training import loss_and_gradients

SMALL = 4096
MODELS = {name: CASES[name] for name in ("resnet", "encoder", "shared_views")}
MODELS["broken"] = Case(Broken, lambda: torch.randn(64, 128))


def enable(case: Case, *, verify: bool = True, policy: str = "swap_all") -> nn.Module:
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(case.make(), policy=policy, min_swap_bytes=SMALL, verify=verify)


def step(case: Case, model: nn.Module) -> list[torch.Tensor]:
    return [*loss_and_gradients(model, case.loss(model(case.batch()))), torch.rand(3)]
