"""Callback for training under a byte budget with a Hugging Face Trainer, added after the Trainer is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from lmswap.errors import OptionError
from lmswap.integrations.training import ManagedTraining
from lmswap.reporting import Report


class LmswapCallback(TrainerCallback):
    """Keeps the model of a Trainer, or of a subclass, within a byte budget while ``train`` trains it.

    It is enabled when training begins, and disabled when it ends. A Trainer does not report exceptions to callbacks: if
    ``train`` raises, the model stays enabled until the next ``train``, or `lmswap.disable`. With each logged loss the
    figures of `Report.metrics` are logged, as an entry of their own, to all that the Trainer reports to.

    Examples:
        >>> trainer.add_callback(LmswapCallback(trainer, "6GiB"))
    """

    def __init__(self, trainer: Trainer, budget: int | str = "auto", **options: Any) -> None:
        """Take the arguments of `lmswap.enable`; ``trainer``: its ``log`` gets the figures.

        ``optimizer=True`` stands for the optimizer of the Trainer.

        Raises:
            OptionError: an argument cannot be read.
        """
        self._trainer = trainer
        self._training = ManagedTraining(budget, options)

    @property
    def report(self) -> Report:
        """The report of the training under way, or the last one at its end; an `OptionError` before the first."""
        return self._training.report()

    def on_train_begin(  # noqa: D102
        self, args: TrainingArguments, *_: Any, model: nn.Module, optimizer: Any, **__: Any
    ) -> None:
        if args.torch_compile:
            raise OptionError("torch_compile=True compiles the model, which lmswap captures itself; set it to False")
        if args.n_gpu > 1:
            raise OptionError(
                f"the Trainer copies the model to {args.n_gpu} GPUs in each step, lmswap manages one; start a process "
                "for each by torchrun, or let CUDA_VISIBLE_DEVICES name one"
            )
        is_prepared = isinstance(optimizer, AcceleratedOptimizer)
        self._training.begin(model, [optimizer.optimizer if is_prepared else optimizer])
        if is_prepared:
            optimizer.__setstate__({})  # where gradients are scaled it keeps the step that its optimizer had before

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:  # noqa: D102
        # The reporting callbacks run before this one: what it adds to `logs` would not reach them.
        if "loss" in logs:  # of training: evaluations have "eval_loss", and the entry logged here has none
            self._trainer.log(dict(self.report.metrics()))

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: D102
        self._training.end()
