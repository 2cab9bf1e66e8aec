"""Other work of training scripts runs on a card that has the budget, bitwise equal to plain torch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lmswap
from benchmarks.unet3d.network import UNet3d
from tests.gpu import trainings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("no_garbage"),
]
SIDE = 64
# With shares of the plain peak: parameters, averages, gradients and optimizers are most of it in mixed precision.
HABITS = {
    "mixed precision, clipping, averaging, checkpoints": (0.8, ("autocast", "clip", "average", "validate", "save")),
    "mixed precision, accumulation, an emptied cache": (0.75, ("autocast", "accumulate", "validate", "empty")),
    "channels last, copies of the model": (0.65, ("channels last", "clip", "validate", "copy")),
}


def train(habits, budget=None):
    """Losses, validations and parameters, and what was reserved at most in each step and validation."""
    trainings.begin()
    order = torch.channels_last_3d if "channels last" in habits else torch.preserve_format
    with torch.device("cpu"):
        model = UNet3d().to("cuda", memory_format=order)
        data = TensorDataset(torch.randn(8, 4, *3 * [SIDE]), torch.rand(8, 3, *3 * [SIDE]).round())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "average" in habits else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        lmswap.enable(model, budget=budget)
    results, reserved = [], []
    for step, (images, labels) in enumerate(DataLoader(data, pin_memory=True)):
        torch.cuda.reset_peak_memory_stats()
        x, y = images.to("cuda", non_blocking=True, memory_format=order), labels.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled="autocast" in habits):
            predicted = model(x)
            loss = nn.functional.binary_cross_entropy_with_logits(predicted.float(), y)
        loss.backward()
        if "clip" in habits:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if "accumulate" not in habits or step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
        results.append(loss.detach().cpu())
        reserved.append(torch.cuda.max_memory_reserved())
        if "validate" in habits and step in (3, 5):
            model.eval()
            with torch.inference_mode():
                results.append(model(x).mean().cpu())
            model.train()
            reserved.append(torch.cuda.max_memory_reserved())
        if "empty" in habits and step % 3 == 0:
            torch.cuda.empty_cache()
        if "save" in habits and step == 4:
            copy.deepcopy(model.state_dict())
        if "copy" in habits and step == 4:
            copy.deepcopy(model)
    results += [parameter.detach().cpu() for parameter in model.parameters()]
    if budget is not None:
        trainings.end(model)
    return results, reserved


@pytest.mark.parametrize(("share", "habits"), HABITS.values(), ids=HABITS)
def test_a_card_of_the_budget_runs_what_training_scripts_do(share, habits):
    expected, reserved = train(habits)
    budget = int(share * max(reserved))
    results, reserved = train(habits, budget)
    assert all(map(torch.equal, results, expected))
    assert max(reserved) <= budget, [nbytes / budget for nbytes in reserved]
