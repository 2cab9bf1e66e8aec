"""Steps of a few ops of one second each, on a machine whose link moves a byte a second each way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmswap.analyze import training_step as module
from lmswap.analyze.training_step import Optimizer, training_step
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program
from tests.ir.build import build, unit_machine

ADAMW = Optimizer("adamw", 8)
MACHINE: Machine = replace(unit_machine(), flops_per_second=1e30, bytes_per_second=1e30, op_seconds=1.0)
HOST_BYTES_PER_SECOND = 28.0  # CPU Adam updates an element a second


def training(layers: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A step of layers with one bf16 weight each, of 2 bytes, in chunks of one; activations take a byte."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    names = [f"layers.{number}.W" for number in range(layers)]
    forward = [f"f{number} 1: x{number} {name} -> x{number + 1}" for number, name in enumerate(names)]
    backward = [
        f"g{number} 1: t{number + 1} x{number} {names[number]} -> d{number} t{number}"
        for number in reversed(range(layers))
    ]
    text = "\n".join(("forward", *forward, "backward", *backward))
    gradients = [f"d{number}" for number in range(layers)]
    sizes = dict.fromkeys((*names, *gradients), 2)
    step = build(text, sizes=sizes, outputs=f"x{layers}", tangents=f"t{layers}", gradients=" ".join(gradients))
    kinds = {step.id(name): name for name in names}
    parameter = step.program.buffers[step.id("x0")].kind.PARAMETER
    buffers = tuple(
        replace(buffer, kind=parameter, name=kinds[buffer.id]) if buffer.id in kinds else buffer
        for buffer in step.program.buffers
    )
    pairs = tuple((step.id(name), step.id(gradient)) for name, gradient in zip(names, gradients, strict=True))
    program = replace(step.program, buffers=buffers, gradients=pairs)
    return training_step(program, ADAMW, micro_batches=micro_batches)
