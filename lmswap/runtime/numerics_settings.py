"""Settings that affect the numerics of ops; recomputation is refused under other settings than the forward's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from lmswap.errors import OptionError
from lmswap.runtime import _C
from lmswap.torch_compat.operators import is_nnpack_enabled

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
# These, and the host's arithmetic, do not affect a GPU's ops, which autograd calls on a thread of its own.
_CALLS_ON_CPU: dict[str, Callable[[], Any]] = {
    "get_num_threads()": torch.get_num_threads,
    "backends.nnpack.flags()": is_nnpack_enabled,
    "set_flush_denormal(), or another floating-point mode of the thread,": _C.float_mode,  # torch has no getter
}


class NumericsGuard:
    """The settings of one graph's forwards on ``device``, whose ops are recomputed in its backwards."""

    def __init__(self, model: str, device: torch.device) -> None:
        self._model = model
        self._calls = _CALLS | _CALLS_ON_CPU if device.type == "cpu" else _CALLS
        self._settings: set[tuple[Any, ...]] = set()  # of forwards since the last one that followed a backward
        self._had_backward = False

    def begins(self, phase: str) -> None:
        """Check the settings before a run of the graph.

        Raises:
            OptionError: it is a backward, and a forward ran under other settings.
        """
        now = (*(call() for call in self._calls.values()), *_read(torch))
        if phase == "backward":
            self._had_backward = True
            for before in self._settings - {now}:
                self._refuse(before, now)
        else:
            if self._had_backward:
                self._settings.clear()
            self._had_backward = False
            self._settings.add(now)

    def _refuse(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
        names = (*self._calls, *_NAMES)
        others = ", ".join(
            f"torch.{name} was {first} and is {second}"
            for name, first, second in zip(names, before, now, strict=True)
            if first != second
        )
        raise OptionError(
            f"{self._model}'s backward would recompute ops of its forward under settings that round differently: "
            f"{others}. Call backward() under the settings of the forward, or enable the model with "
            'policy="swap", which recomputes nothing'
        )
