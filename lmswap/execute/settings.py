"""Does what runs again round as it did? Only under its first run's settings: torch chooses kernels by them."""

from __future__ import annotations

import operator
from typing import Any

import torch

from lmswap.errors import OptionError

_NAMES = (
    "backends.fp32_precision",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.benchmark",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
_read = operator.attrgetter(*_NAMES)


class FirstRuns:
    """The settings under which one graph's forwards ran, whose ops run again in its backwards."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._settings: set[tuple[Any, ...]] = set()  # of forwards since the last one that followed a backward
        self._is_over = False

    def begins(self, phase: str) -> None:
        """A run of the graph is about to begin.

        Raises:
            OptionError: it is a backward, and would compute under other settings than a forward.
        """
        now = (torch.are_deterministic_algorithms_enabled(), *_read(torch))
        if phase == "backward":
            self._is_over = True
            for before in self._settings - {now}:
                self._refuse(before, now)
        else:
            if self._is_over:
                self._settings.clear()
            self._is_over = False
            self._settings.add(now)

    def _refuse(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
        names = ("are_deterministic_algorithms_enabled()", *_NAMES)
        others = ", ".join(
            f"torch.{name} was {first} and is {second}"
            for name, first, second in zip(names, before, now, strict=True)
            if first != second
        )
        raise OptionError(
            f"{self._model}'s backward would compute some of its forward again, and round otherwise: {others}. Call "
            'backward() under the settings of the forward, or enable the model with policy="swap", which computes '
            "nothing again"
        )
