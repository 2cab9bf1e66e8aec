"""Callback for training under a byte budget in Lightning: ``Trainer(callbacks=[LmswapCallback("6GiB")])``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lmswap.errors import OptionError
from lmswap.integrations.training import ManagedTraining
from lmswap.reporting import Report


class LmswapCallback(Callback):
    """Keeps the network inside a LightningModule within a byte budget while ``fit`` trains it.

    It is enabled when training starts, after the sanity check and after a checkpoint is loaded, and disabled when
    training ends, also by an exception. The figures of `Report.metrics` go to the trainer's loggers every
    ``log_every_n_steps``; with several of these callbacks, as for the networks of a GAN, their names include the
    submodule: "lmswap/generator/peak_bytes".
    """

    def __init__(self, budget: int | str = "auto", *, submodule: str | None = None, **options: Any) -> None:
        """Take the arguments of `lmswap.enable`.

        Args:
            budget: see `lmswap.enable`.
            submodule: the name of the module called by ``training_step``, such as "network"; "" is the LightningModule
                itself, if it calls ``self(...)``. By default the only child with parameters to train.
            options: the other arguments of `lmswap.enable`; ``optimizer=True`` stands for the optimizers of the Trainer
                that train the module.

        Raises:
            OptionError: an argument cannot be read.
        """
        self._training = ManagedTraining(budget, options)
        self._submodule = submodule
        self._logged_step: int | None = None

    @property
    def report(self) -> Report:
        """The report of the training under way, or the last one at its end; an `OptionError` before the first."""
        return self._training.report()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._training.begin(_find(pl_module, self._submodule), trainer.optimizers)
        self._logged_step = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:  # noqa: D102
        # The step's number, and whether it is logged, as in Lightning's own DeviceStatsMonitor.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if not trainer.loggers or not trainer._logger_connector.should_update_logs or step == self._logged_step:
            return
        self._logged_step = step  # of accumulated batches, the first
        several = sum(isinstance(other, LmswapCallback) for other in trainer.callbacks) > 1
        metrics = self.report.metrics(*([f"lmswap/{self._submodule}/"] if several else []))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def on_train_end(self, *_: Any) -> None:  # noqa: D102
        self._training.end()

    def on_exception(self, *_: Any) -> None:  # noqa: D102
        self._training.abandon()


def _find(pl_module: LightningModule, name: str | None) -> nn.Module:
    trained = [name for name, child in pl_module.named_children() if any(p.requires_grad for p in child.parameters())]
    if name is None and len(trained) != 1:
        raise OptionError(
            f"{type(pl_module).__name__} has {len(trained)} children with parameters to train"
            f"{': ' * bool(trained)}{', '.join(trained)}; give the one that training_step calls, "
            'LmswapCallback(budget, submodule="..."), or "" if it calls self(...)'
        )
    try:
        found: nn.Module = pl_module.get_submodule(trained[0] if name is None else name)
    except AttributeError as error:
        known = ", ".join(name for name, _ in pl_module.named_children())
        raise OptionError(f"{type(pl_module).__name__} has no submodule '{name}'; its children are {known}") from error
    return found
