"""A loop with Accelerate: its plain bits, less memory, figures in its trackers."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError
from tests.integrations.scripts import (
    BATCH,
    BUDGET_BYTES,
    FEW,
    PLAIN_BYTES,
    STATE_BUDGET_BYTES,
    WIDE,
    Network,
    grown,
    loader,
    scalars,
    streams_within_the_budget,
    weights,
)
from tests.training import same_bits, session_of

pytest.importorskip("accelerate", reason="accelerate is missing, which make integrations installs")
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
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


def test_a_training_state_beyond_the_budget_has_plain_bits(tmp_path, no_garbage):
    """With accumulation and clipping, and from its checkpoint."""

    def run(*budget):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = Network(**WIDE)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
        if budget:
            lmswap.enable(model, *budget, optimizer=optimizer)
        prepared = accelerator.prepare(model, optimizer, loader(FEW), schedule)

        def train():
            model, optimizer, batches, schedule = prepared
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            return [norm, *weights(model)]

        seen = train()
        report = lmswap.report(model) if budget else None
        accelerator.save_state(tmp_path)
        train()
        accelerator.load_state(tmp_path)
        seen += train()
        lmswap.disable(model)
        return seen, report

    actual, report = run(STATE_BUDGET_BYTES)
    assert same_bits(actual, run()[0])
    assert streams_within_the_budget(report)


def test_state_streams_where_gradients_are_scaled():
    """Which is where the prepared optimizer assigns the step that it was prepared with."""

    def run(enables):
        AcceleratorState._reset_state(reset_partial_state=True)
        Accelerator(cpu=True)
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters())
        if enables:
            lmswap.enable(model, "1GiB", optimizer=optimizer, weights="keep", min_swap_bytes=1024)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        prepared = AcceleratedOptimizer(optimizer, scaler=scaler)
        if enables:
            updates = session_of(model).updates
            updates.stream_state(updates.state_bytes)
        for x, y in loader(FEW):
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            prepared.step()
            prepared.zero_grad()
        moments = [values["exp_avg"] for values in optimizer.state.values() if values["exp_avg"].ndim == 2]
        if enables:
            assert all(map(updates.is_non_resident, moments[1:-1]))
        lmswap.disable(model)
        return [*weights(model), *moments]

    assert same_bits(run(enables=True), run(enables=False))


def test_a_prepared_optimizer_is_refused_with_advice():
    AcceleratorState._reset_state(reset_partial_state=True)
    model = Network()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(OptionError, match="AcceleratedOptimizer wraps AdamW, its attribute `optimizer`: give that"):
        lmswap.enable(model, optimizer=optimizer)
