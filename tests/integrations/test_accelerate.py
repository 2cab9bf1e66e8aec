"""A loop with Accelerate: its plain bits, less memory, figures in its trackers."""

import pytest
import torch
from torch import nn

import lmswap
from tests.integrations.scripts import (
    BATCH,
    BUDGET_BYTES,
    FEW,
    PLAIN_BYTES,
    Network,
    grown,
    loader,
    scalars,
    weights,
)
from tests.training import same_bits

pytest.importorskip("accelerate", reason="accelerate is missing, which make integrations installs")
from accelerate import Accelerator


def trained(batch=FEW, folder=None, accumulates=1, **options):
    """The weights and the report of a training, which is managed if there are options."""
    tracker = {"log_with": "tensorboard", "project_dir": folder} if folder else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulates, **tracker)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(batch))
    if options:
        lmswap.enable(model, **options)
    for step, (x, y) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if options:
            accelerator.log({"loss": loss.item(), **lmswap.report(model).metrics()}, step=step)
    accelerator.end_training()
    report = lmswap.report(model) if options else None
    lmswap.disable(model)
    return weights(model), report


def test_accelerate_bits_are_plain_and_the_peak_is_within_the_budget():
    with grown() as plain:
        expected, _ = trained(BATCH)
    with grown() as ours:
        actual, report = trained(BATCH, budget=BUDGET_BYTES, policy="swap_all")

    assert same_bits(actual, expected)
    assert report.highest_peak_bytes <= BUDGET_BYTES < PLAIN_BYTES < plain.nbytes
    assert ours.nbytes < plain.nbytes
    assert report.swapped_out_bytes > PLAIN_BYTES / 2


def test_accumulated_gradients_have_plain_bits_and_tensorboard_figures(tmp_path):
    actual, report = trained(folder=tmp_path, accumulates=2, budget="6GiB")
    assert same_bits(actual, trained(accumulates=2)[0])
    found = scalars(tmp_path / "run")
    assert set(found) == {"loss", *report.metrics()}
    assert set(found["lmswap/peak_bytes"]) == {0, 1, 2}
    assert set(found["lmswap/budget_bytes"].values()) == {6 * 2**30}
