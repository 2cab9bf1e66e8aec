"""Python floats that change from call to call, such as a temperature or the weight of a loss, as inputs of a graph.

torch makes a float a constant of the trace, and a trace's input once a second value comes. Graphs then read the number
from a float64 tensor and pass it to their ops, as eager mode does. For Inductor torch replaces such ops by ones on
tensors, which round differently; `no_float_tensors` leaves them out (torch 2.13; no upstream issue known).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._functorch._aot_autograd import graph_compile

_wrap_float: Any = VariableBuilder.wrap_symfloat
_format: Any = InstructionTranslatorBase._format_value


@contextmanager
def floats_as_inputs() -> Iterator[None]:
    """Have Dynamo trace a float as an input from its second value on."""
    with (
        torch._dynamo.config.patch(specialize_float=False),
        mock.patch.object(VariableBuilder, "wrap_symfloat", _wrap_changing_float),
        mock.patch.object(InstructionTranslatorBase, "_format_value", _format_number),
    ):
        yield


@contextmanager
def no_float_tensors() -> Iterator[None]:
    """Keep the ops on numbers that AOTAutograd would replace by ops on float64 tensors."""
    with mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", lambda module: None):
        yield


def _wrap_changing_float(self: VariableBuilder, value: float) -> Any:
    """Wrap a float as with dynamic sizes, which decide whether it may become an input; sizes stay static."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        return _wrap_float(self, value)


def _format_number(self: InstructionTranslatorBase, specification: Any, flags: int) -> None:
    """Format a number that is an input by its value, which becomes a constant of the trace.

    torch 2.13 ignores the specification, or fails on it (pytorch#189830, pytorch#197093).
    """
    if isinstance(number := self.stack[-1], SymNodeVariable):
        self.stack[-1] = ConstantVariable.create(number.evaluate_expr())
    _format(self, specification, flags)
