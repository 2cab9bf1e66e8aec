"""Settings under which ops compute, and the refusal to recompute any under others: their results would differ."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from lmswap.errors import OptionError
from lmswap.execute import _C

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
_CALLS: dict[str, Callable[[], Any]] = {
    "are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "backends.cuda.preferred_blas_library()": torch.backends.cuda.preferred_blas_library,
    "backends.cuda.preferred_linalg_library()": torch.backends.cuda.preferred_linalg_library,
}
# Of a GPU's ops neither these nor the host's arithmetic decide; autograd calls them on a thread of its own, too.
_CALLS_ON_CPU: dict[str, Callable[[], Any]] = {
    "get_num_threads()": torch.get_num_threads,
    "backends.nnpack.flags()": torch._C._get_nnpack_enabled,
    "set_flush_denormal(), or another floating-point mode of the thread,": _C.float_mode,  # torch has no getter
}


class FirstRuns:
    """The settings under which one graph's forwards ran on ``device``, whose ops run again in its backwards."""

    def __init__(self, model: str, device: torch.device) -> None:
        self._model = model
        self._calls = _CALLS | _CALLS_ON_CPU if device.type == "cpu" else _CALLS
        self._settings: set[tuple[Any, ...]] = set()  # of forwards since the last one that followed a backward
        self._is_over = False

    def begins(self, phase: str) -> None:
        """A run of the graph is about to begin.

        Raises:
            OptionError: it is a backward, and would compute under other settings than a forward.
        """
        now = (*(call() for call in self._calls.values()), *_read(torch))
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
        names = (*self._calls, *_NAMES)
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
