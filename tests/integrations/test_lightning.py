"""Lightning's trainer with the callback: its plain bits, less memory, figures in its loggers, nothing left over."""

import pytest
import torch
from torch import nn

from lmswap import api
from lmswap.errors import OptionError
from tests.integrations.scripts import (
    BATCH,
    BUDGET_BYTES,
    FEW,
    PLAIN_BYTES,
    STATE_BUDGET_BYTES,
    SWAPPED_PARAMETERS,
    WIDE,
    Network,
    grown,
    loader,
    scalars,
    streams_within_the_budget,
    weights,
)
from tests.training import same_bits

pytest.importorskip("lightning", reason="lightning is missing, which make integrations installs")
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from lmswap.integrations.lightning import LmswapCallback


class Regression(lightning.LightningModule):
    def __init__(self, **size):
        super().__init__()
        self.network, self.criterion = Network(**size), nn.MSELoss()

    def training_step(self, batch, index):
        x, y = batch
        loss = self.criterion(self.network(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.criterion(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class TwoNetworks(Regression):
    """Trained in turn, each by its own optimizer, as a GAN's are."""

    def __init__(self):
        super().__init__()
        self.other, self.automatic_optimization = Network(), False

    def training_step(self, batch, index):
        x, y = batch
        for network, optimizer in zip((self.network, self.other), self.optimizers(), strict=True):
            loss = self.criterion(network(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.network.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.1)


def fit(module, callbacks=(), batch=FEW, *, validates=False, ckpt_path=None, **settings):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1, **settings}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[*callbacks], **quiet, **settings)
    trainer.fit(module, loader(batch), loader(batch) if validates else None, ckpt_path=ckpt_path)
    return trainer


def regression(kind=Regression, **size):
    torch.manual_seed(0)
    return kind(**size)


def trained(callbacks=(), *, size=None, **settings):
    module = regression(**(size or {}))
    fit(module, callbacks, **settings)
    return weights(module)


def test_lightning_bits_are_plain_and_the_peak_is_within_the_budget():
    with grown() as plain:
        expected = trained(batch=BATCH)
    callback = LmswapCallback(BUDGET_BYTES, policy="swap_all")
    with grown() as ours:
        actual = trained([callback], batch=BATCH)

    assert same_bits(actual, expected)
    assert callback.report.highest_peak_bytes <= BUDGET_BYTES < PLAIN_BYTES < plain.nbytes
    assert ours.nbytes < plain.nbytes
    assert callback.report.swapped_out_bytes > PLAIN_BYTES / 2


def test_a_training_state_beyond_the_budget_has_plain_bits(no_garbage):
    settings = {"size": WIDE, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "validates": True}
    callback = LmswapCallback(STATE_BUDGET_BYTES, optimizer=True)
    assert same_bits(trained([callback], **settings), trained(**settings))
    assert streams_within_the_budget(callback.report)


def test_figures_are_in_tensorboard_at_the_steps_of_the_loss(tmp_path):
    callback = LmswapCallback("6GiB")
    settings = {"max_epochs": 2, "log_every_n_steps": 2, "logger": TensorBoardLogger(tmp_path)}
    trainer = fit(regression(), [callback], **settings)

    found = scalars(trainer.logger.log_dir)
    assert set(found["loss"]) == set(found["lmswap/peak_bytes"]) == {1, 3, 5}
    assert set(found["lmswap/budget_bytes"].values()) == {6 * 2**30}
    assert {name for name in found if name.startswith("lmswap/")} == set(callback.report.metrics())


def test_accumulated_gradients_have_plain_bits_and_one_log_per_step(tmp_path):
    settings = {"accumulate_grad_batches": 2, "max_epochs": 2}
    trainer_logger = TensorBoardLogger(tmp_path)
    actual = trained([LmswapCallback("6GiB")], logger=trainer_logger, **settings)
    assert same_bits(actual, trained(**settings))
    found = scalars(trainer_logger.log_dir)
    assert set(found["loss"]) == set(found["lmswap/peak_bytes"]) == {0, 1, 2, 3}


def test_validation_changes_neither_bits_nor_training_figures():
    callback = LmswapCallback("6GiB")
    settings = {"validates": True, "val_check_interval": 2, "num_sanity_val_steps": 1}
    assert same_bits(trained([callback], **settings), trained(**settings))
    assert callback.report.trains


@pytest.mark.parametrize("options", [{}, SWAPPED_PARAMETERS], ids=["", "parameters"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(tmp_path, options):
    expected = trained(max_epochs=2)
    first = [LmswapCallback("6GiB", **options), ModelCheckpoint(tmp_path, filename="first")]
    fit(regression(), first, enable_checkpointing=True)
    module, callback = Regression(), LmswapCallback("6GiB", **options)
    fit(module, [callback], max_epochs=2, ckpt_path=tmp_path / "first.ckpt")
    assert same_bits(weights(module), expected)
    assert (callback.report.state_in_bytes > 0) == bool(options)


def test_the_module_is_given_back_at_the_end_and_the_report_stays():
    callback = LmswapCallback("6GiB")
    with pytest.raises(OptionError, match="no report yet"):
        _ = callback.report
    module = regression()
    fit(module, [callback])
    assert not api.sessions()
    assert module.network._compiled_call_impl is None
    assert callback.report.steps == 3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_module_is_given_back_when_training_fails(error):
    class Failing(Regression):
        def on_train_batch_end(self, outputs, batch, index):
            assert api.sessions()
            raise error("in the second batch")

    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(regression(Failing), [LmswapCallback("6GiB")])
    assert not api.sessions()


def test_figures_distinguish_two_networks(tmp_path):
    callbacks = [LmswapCallback("6GiB", submodule=name, **SWAPPED_PARAMETERS) for name in ("network", "other")]
    logger = TensorBoardLogger(tmp_path)
    module = regression(TwoNetworks)
    fit(module, callbacks, logger=logger)
    assert all(callback.report.state_in_bytes > 0 for callback in callbacks)
    found = scalars(logger.log_dir)
    assert set(found["loss"]) == set(found["lmswap/network/peak_bytes"]) == set(found["lmswap/other/peak_bytes"])
    plain = regression(TwoNetworks)
    fit(plain)
    assert same_bits(weights(module), weights(plain))


def test_a_module_that_calls_itself_is_enabled_as_a_whole():
    class Whole(Regression):
        def forward(self, x):
            return self.network(x)

        def training_step(self, batch, index):
            return self.criterion(self(batch[0]), batch[1])

    callback = LmswapCallback("6GiB", submodule="")
    module = regression(Whole)
    fit(module, [callback])
    assert callback.report.model == "Whole"
    assert callback.report.steps == 3
    assert same_bits(weights(module), trained())


def test_an_ambiguous_submodule_is_refused_with_the_list_of_submodules():
    with pytest.raises(OptionError, match="2 children with parameters to train: network, other; give the one"):
        fit(regression(TwoNetworks), [LmswapCallback("6GiB")])
    with pytest.raises(OptionError, match="no submodule 'unet'; its children are network, criterion"):
        fit(regression(), [LmswapCallback("6GiB", submodule="unet")])
    assert not api.sessions()
