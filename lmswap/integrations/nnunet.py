"""Trainer for nnU-Net under a byte budget: a subclass in a folder of ``nnUNet_extTrainer`` names the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from lmswap.integrations.training import ManagedTraining


class LmswapTrainer(nnUNetTrainer):
    """Keeps the network of nnU-Net's trainer within a byte budget while it trains and validates in each epoch.

    The network is enabled when the training starts, and disabled when it ends; nnU-Net's own compilation is off. The
    report is logged at the end. Attributes of the class are the arguments of `lmswap.enable`; in ``options``,
    ``"optimizer": True`` stands for the trainer's.

    Examples:
        >>> class nnUNetTrainer_8GiB(LmswapTrainer):  # nnUNetv2_train ... -tr nnUNetTrainer_8GiB
        ...     budget = "8GiB"
    """

    budget: ClassVar[int | str] = "auto"
    options: ClassVar[Mapping[str, Any]] = {}

    def _do_i_compile(self) -> bool:
        return False

    def on_train_start(self) -> None:  # noqa: D102
        super().on_train_start()
        self.managed = ManagedTraining(self.budget, self.options)
        self.managed.begin(self.network.module if self.is_ddp else self.network, [self.optimizer])

    def on_train_end(self) -> None:  # noqa: D102
        self.managed.end()
        self.print_to_log_file(self.managed.report())
        super().on_train_end()
