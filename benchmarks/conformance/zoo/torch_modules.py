"""Trials of the modules in torch's own tests: every entry of ``module_db`` with some of its sample inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db

from benchmarks.conformance.trial import Trial
from benchmarks.conformance.zoo.samples import Scaled, fresh_call, seeded, spread

_MODULES = {info.name: info for info in module_db}
NAMES = tuple(_MODULES)
# Of the samples of one module, in training mode and in evaluation mode; they have up to 857, some of the same shapes.
_MAX_SAMPLES = {
    (torch.float32, True): 8,
    (torch.bfloat16, True): 3,
    (torch.float32, False): 3,
}
_SCALE = 0.9  # what was a probability stays one


def trials(name: str) -> Iterator[Trial]:
    """Samples of the module from first to last, in training mode and not, in both types that it has."""
    info = _MODULES[name]
    for (dtype, is_training), most in _MAX_SAMPLES.items():
        for number, copies, sample in spread(_samples(info, dtype, is_training), most):
            mode = "training" if is_training else "evaluation"
            made = _trial(info, dtype, sample, copies=copies)
            yield replace(made, is_training=is_training, name=f"{dtype}, {mode}, sample {number}", group=mode)


def _trial(info: ModuleInfo, dtype: torch.dtype, sample: Any, *, copies: bool) -> Trial:
    made_with, called_with = sample.constructor_input, sample.forward_input
    return Trial(
        lambda: Scaled(info.module_cls(*made_with.args, **made_with.kwargs).to(dtype), _SCALE, copies=copies),
        lambda: fresh_call(called_with.args, called_with.kwargs),
    )


def _samples(info: ModuleInfo, dtype: torch.dtype, is_training: bool) -> list[Any]:
    def make() -> list[Any]:
        return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=is_training)

    try:
        return [sample for sample in seeded(make) if sample.forward_input is not None]
    except RuntimeError:
        if dtype is torch.float32:
            raise
        return []  # torch's own sample cannot be made in it
