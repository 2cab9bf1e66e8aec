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
from accelerate.state import AcceleratorState


def trained(batch=FEW, folder=None, accumulates=1, *, precision="no", is_enabled_first=False, **options):
    """The weights and the report of a training of the outer layers, which is managed if there are options."""
    tracker = {"log_with": "tensorboard", "project_dir": folder} if folder else {}
    AcceleratorState._reset_state(reset_partial_state=True)  # each process has one precision
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulates, **tracker)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = Network()
    model.layers[4:-4].requires_grad_(False)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    if is_enabled_first:
        lmswap.enable(model, **options)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(batch))
    if options and not is_enabled_first:
        lmswap.enable(model, **options)
    for step, (x, y) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if folder:
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


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_that_was_enabled_before_prepare_has_plain_bits(precision):
    options = {"budget": "1GiB", "policy": "swap_all", "weights": "swap", "min_swap_bytes": 1024}
    actual, report = trained(precision=precision, is_enabled_first=True, **options)
    assert same_bits(actual, trained(precision=precision)[0])
    assert report.swapped_in_bytes > 0
    assert "weights) to the" in " ".join(str(report).split())
