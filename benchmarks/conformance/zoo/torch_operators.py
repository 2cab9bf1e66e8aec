"""Trials of the operators in torch's own tests: every entry of ``op_db`` that has a gradient on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from benchmarks.conformance.trial import Trial
from benchmarks.conformance.zoo.samples import Scaled, fresh_call, seeded, spread

# There, operators that draw numbers set a seed first, which no graph can; each training has the same one anyway.
common_methods_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
_TYPES = (torch.float32, torch.bfloat16)
_MAX_SAMPLES = {torch.float32: 5, torch.bfloat16: 2}
_MAX_IN_PLACE = 1
_SCALE = 1.0  # what an operator is defined for stays that


def _trains(info: OpInfo) -> bool:
    return info.supports_autograd and bool(info.supported_backward_dtypes("cpu") & {*_TYPES})


_OPERATORS = {
    f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name: info
    for info in op_db
    if _trains(info)
}
NAMES = tuple(_OPERATORS)


class Operator(nn.Module):
    """An operator as a module."""

    def __init__(self, operator: Callable[..., Any], shown: Callable[[Any], Any]) -> None:
        super().__init__()
        self.operator, self.shown = operator, shown

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What can be differentiated of the operator's result."""
        return self.shown(self.operator(*args, **kwargs))


def trials(name: str) -> Iterator[Trial]:
    """Samples of the operator from first to last in both types that it has, and of its form that writes in place."""
    info = _OPERATORS[name]
    for dtype in _TYPES:
        if dtype not in info.supported_backward_dtypes("cpu"):
            continue
        samples = seeded(lambda dtype=dtype: info.sample_inputs("cpu", dtype, requires_grad=True))
        for number, copies, sample in spread(samples, _MAX_SAMPLES[dtype]):
            yield _trial(info.get_op(), sample, f"{dtype}, sample {number}", copies=copies)
        in_place = info.get_inplace()
        if dtype is torch.float32 and in_place is not None and info.supports_inplace_autograd:
            for number, copies, sample in spread(
                [each for each in samples if not each.broadcasts_input], _MAX_IN_PLACE
            ):
                yield _trial(in_place, sample, f"in place, sample {number}", copies=copies)


def _trial(operator: Callable[..., Any], sample: Any, name: str, *, copies: bool) -> Trial:
    return Trial(
        lambda: Scaled(Operator(operator, sample.output_process_fn_grad), _SCALE, copies=copies),
        lambda: fresh_call((sample.input, *sample.args), sample.kwargs),
        name=name,
        group="all",
    )
