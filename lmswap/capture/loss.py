"""How much memory does the caller's code take when a forward has run, up to what runs next? Assumed, then measured.

That code computes the loss and goes backward through it; where a graph break cut the model, it is what stands there.
In programs an op of its own stands for it, whose scratch this is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from lmswap.ir.costs import OpCosts
from lmswap.ir.program import LOSS, BufferKind, Program

# Cross entropy holds its log-softmax, its gradient and the output's, all in fp32 also where the output is not.
_ASSUMED_TENSORS, _LEAST_ITEM_BYTES = 3, 4


class TensorPeak(Protocol):
    """The part of `lmswap.hardware.memory.DeviceMemory` that is asked here."""

    def used_tensor_bytes(self) -> int:
        """What tensors hold now."""

    def peak_tensor_bytes(self) -> int:
        """The highest value since `reset_tensor_peak`."""

    def reset_tensor_peak(self) -> None:
        """Starts a new measurement."""


def assumed_bytes(program: Program) -> int:
    """What a loss of a graph's outputs may take beside them, before it was seen."""
    # Of each the first value: later ones may be expanded views of it.
    tangents = {value.buffer: value for value in reversed(program.values) if _is_tangent(program, value.buffer)}
    item_bytes = {buffer: getattr(torch, value.dtype).itemsize for buffer, value in tangents.items()}
    return sum(
        _ASSUMED_TENSORS * max(_LEAST_ITEM_BYTES, item_bytes[buffer]) * math.prod(value.shape)
        for buffer, value in tangents.items()
    )


class LossMeter:
    """Looks on from the first forward of each graph until the next segment begins; later steps are left alone."""

    def __init__(self, memory: TensorPeak) -> None:
        self._memory = memory
        self._watched: int | None = None  # the graph whose forward ran last
        self._held_bytes = 0
        self._seen_bytes: dict[int, int] = {}  # by graph: above what was held when its forward had run

    def begins(self, graph: int, phase: str) -> None:
        """A segment is about to run. A second forward of the same graph tells that there was no loss."""
        if self._watched is not None and (phase == "backward" or graph != self._watched):
            self._seen_bytes[self._watched] = max(0, self._memory.peak_tensor_bytes() - self._held_bytes)
        self._watched = None

    def ran(self, graph: int, phase: str) -> None:
        """It has run."""
        if phase == "forward" and graph not in self._seen_bytes:
            self._watched, self._held_bytes = graph, self._memory.used_tensor_bytes()
            self._memory.reset_tensor_peak()

    def as_seen(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        """``costs`` of a step of ``graphs`` with what their losses took, as far as they were seen."""
        ops = _loss_ops(program, graphs)
        return costs.with_scratch({op: self._seen_bytes[graph] for graph, op in ops if graph in self._seen_bytes})

    def unassumed(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        """``costs`` of a step of ``graphs`` in which losses that were not seen take nothing."""
        ops = _loss_ops(program, graphs)
        return costs.with_scratch({op: 0 for graph, op in ops if graph not in self._seen_bytes})


def loss_bytes(costs: OpCosts, program: Program) -> int:
    """What the largest loss of the step takes."""
    return max((costs.scratch_bytes[op.index] for op in program.ops if op.target == LOSS), default=0)


def without_losses(costs: OpCosts, program: Program) -> OpCosts:
    """``costs`` of a step whose losses take their memory elsewhere."""
    return costs.with_scratch({op.index: 0 for op in program.ops if op.target == LOSS})


def _loss_ops(program: Program, graphs: Sequence[int]) -> list[tuple[int, int]]:
    """The graph and the number of each op that stands for a loss; ``graphs`` are the step's, in forward order."""
    return [(graphs[program.segment_of(op.index).graph], op.index) for op in program.ops if op.target == LOSS]


def _is_tangent(program: Program, buffer: int) -> bool:
    return program.buffers[buffer].kind is BufferKind.TANGENT
