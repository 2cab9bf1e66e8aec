"""Base of the trainers' callbacks: a module that is enabled while a trainer trains it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

import lmswap
from lmswap.api import is_enabled
from lmswap.errors import OptionError
from lmswap.options import Options
from lmswap.reporting import Report

_log = logging.getLogger(__name__)


class ManagedTraining:
    """Enables a module when its training begins, reports on it, and disables it when the training ends."""

    def __init__(self, budget: int | str, options: Mapping[str, Any]) -> None:
        """Take the arguments of `lmswap.enable`; ``optimizer`` is True for those of the trainer, by default False.

        Raises:
            OptionError: one of them cannot be read; raised here, before data are loaded.
        """
        self._options = {"budget": budget, **options}
        own_names = ("device", "optimizer", "optimizer_device")  # of `lmswap.enable`, beside its options
        Options.from_mapping({name: value for name, value in self._options.items() if name not in own_names})
        if not isinstance(given := options.get("optimizer", False), bool):
            raise OptionError(f"optimizer must be True, for those of the trainer, or False, not {given!r}")
        self._module: nn.Module | None = None
        self._disables = True  # what it has enabled
        self._last: Report | None = None

    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Enable ``module``, on its device, before the trainer trains it; see `lmswap.enable`.

        One that is enabled already stays as it is, also at the end: a trainer would first move the whole of it to the
        GPU, which may be too small.

        Args:
            module: what to enable.
            optimizers: all of the trainer, of which some may train other modules.

        Raises:
            OptionError: it is enabled already, and arguments were given here, too; or no optimizer trains it.
        """
        self.abandon()  # a training whose failure was not reported
        self._disables = not is_enabled(module)
        if self._disables:
            own = _optimizers_of(module, optimizers) if self._options.get("optimizer") else None
            lmswap.enable(module, **{**self._options, "optimizer": own})
        elif self._options != {"budget": "auto"}:
            raise OptionError(
                f"{type(module).__name__} is enabled already: leave out arguments here ({', '.join(self._options)}), "
                "or the call of lmswap.enable"
            )
        self._module = module

    def report(self) -> Report:
        """Return the report of the training under way, or the last one at its end.

        Raises:
            OptionError: there was none yet.
        """
        if self._module is not None:
            return lmswap.report(self._module)
        if self._last is None:
            raise OptionError("there is no report yet: the trainer has not finished a training")
        return self._last

    def end(self) -> None:
        """Log and keep the report, and disable the module if `begin` has enabled it."""
        if self._module is not None:
            self._last = self.report()
            _log.info("%s", self._last)
            self.abandon()

    def abandon(self) -> None:
        """Disable the module, as `end` does, after a failure, also of its device. Idempotent."""
        if self._module is not None:
            module, self._module = self._module, None
            if self._disables:
                lmswap.disable(module)


def _optimizers_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    own = {*module.parameters()}
    found = [each for each in optimizers if any(not own.isdisjoint(group["params"]) for group in each.param_groups)]
    if not found:
        raise OptionError(f"optimizer=True: the trainer has no optimizer that trains {type(module).__name__}")
    return found
