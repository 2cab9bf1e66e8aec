"""What do the callbacks of trainers share? A module that is enabled while a trainer trains it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

import lmswap
from lmswap.errors import OptionError
from lmswap.options import Options
from lmswap.reporting import Report

_log = logging.getLogger(__name__)


class ManagedTraining:
    """Enables a module when its training begins, tells of it meanwhile, and gives it back when the training ends."""

    def __init__(self, budget: int | str, options: Mapping[str, Any]) -> None:
        """Takes the arguments of `lmswap.enable`.

        Raises:
            OptionError: one of them cannot be read; said now, not when the data have been loaded.
        """
        self._options = {"budget": budget, **options}
        Options.from_mapping(self._options)
        self._module: nn.Module | None = None
        self._last: Report | None = None

    def begin(self, module: nn.Module) -> None:
        """The trainer is about to train ``module``, which lies on its device; see `lmswap.enable`."""
        self.abandon()  # one whose failure nobody told of
        self._module = lmswap.enable(module, **self._options)

    def report(self) -> Report:
        """Of the training under way, or of the last one as it ended.

        Raises:
            OptionError: there was none yet.
        """
        if self._module is not None:
            return lmswap.report(self._module)
        if self._last is None:
            raise OptionError("there is no report yet: the trainer has not finished a training")
        return self._last

    def end(self) -> None:
        """The training is over: its report goes to the log, and stays."""
        if self._module is not None:
            self._last = self.report()
            _log.info("%s", self._last)
            self.abandon()

    def abandon(self) -> None:
        """The training has failed: nothing is asked of a device that may have failed, too. Harmless at any time."""
        if self._module is not None:
            module, self._module = self._module, None
            lmswap.disable(module)
